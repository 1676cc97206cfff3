import com.google.rpc.BadRequest;
import foredraft.v1.Common.Sampling;
import foredraft.v1.Generation.GenerateRequest;
import foredraft.v1.Generation.SpeculationStatistics;
import foredraft.v1.GenerationServiceGrpc;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import java.util.concurrent.TimeUnit;

/** Streams one completion. Usage: Generate ADDRESS PROMPT [MAX_NEW_TOKENS] */
public class Generate {
  public static void main(String[] args) throws Exception {
    if (args.length < 2) {
      System.err.println("usage: Generate ADDRESS PROMPT [MAX_NEW_TOKENS]");
      System.exit(2);
    }
    int maxNewTokens = args.length > 2 ? Integer.parseInt(args[2]) : 32;
    GenerateRequest request =
        GenerateRequest.newBuilder()
            .setText(args[1])
            .setSampling(Sampling.newBuilder().setSeed(1).setMaxNewTokens(maxNewTokens))
            .build();
    ManagedChannel channel = Grpc.newChannelBuilder(args[0], InsecureChannelCredentials.create()).build();
    int exitCode = 0;
    try {
      var stub = GenerationServiceGrpc.newBlockingStub(channel).withDeadlineAfter(5, TimeUnit.MINUTES);
      stub.generateStream(request).forEachRemaining(message -> {
        if (message.hasChunk()) {
          System.out.print(message.getChunk().getText());
          System.out.flush();
        } else if (message.hasCompleted()) {
          SpeculationStatistics statistics = message.getCompleted().getStatistics();
          System.err.printf(
              "%n%d tokens in %d rounds, %d of %d draft tokens accepted%n",
              message.getCompleted().getUsage().getCompletionTokenCount(),
              statistics.getRounds(), statistics.getAccepted(), statistics.getDrafted());
        }
      });
    } catch (StatusRuntimeException error) {
      System.err.println(error.getStatus().getCode() + ": " + error.getStatus().getDescription());
      for (var detail : StatusProto.fromThrowable(error).getDetailsList()) {
        if (detail.is(BadRequest.class)) {
          for (var violation : detail.unpack(BadRequest.class).getFieldViolationsList()) {
            System.err.println("  " + violation.getField() + ": " + violation.getDescription());
          }
        }
      }
      exitCode = 1;
    }
    channel.shutdownNow();
    System.exit(exitCode);
  }
}
