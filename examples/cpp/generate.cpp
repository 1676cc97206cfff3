// Streams one completion. Usage: generate [--tls-ca FILE] ADDRESS PROMPT [MAX_NEW_TOKENS]
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "foredraft/v1/generation.grpc.pb.h"

namespace v1 = foredraft::v1;

// The token of the environment is sent through TLS only.
std::shared_ptr<grpc::ChannelCredentials> tls(const std::string& authorities) {
  std::ifstream file(authorities);
  if (!file) throw std::runtime_error("cannot read " + authorities);
  grpc::SslCredentialsOptions options;
  options.pem_root_certs.assign(std::istreambuf_iterator<char>(file), {});
  auto credentials = grpc::SslCredentials(options);
  const char* token = std::getenv("FOREDRAFT_TOKEN");
  return token ? grpc::CompositeChannelCredentials(credentials, grpc::AccessTokenCredentials(token)) : credentials;
}

int main(int argc, char** argv) try {
  std::vector<std::string> arguments(argv + 1, argv + argc);
  auto credentials = grpc::InsecureChannelCredentials();
  if (arguments.size() >= 2 && arguments[0] == "--tls-ca") {
    credentials = tls(arguments[1]);
    arguments.erase(arguments.begin(), arguments.begin() + 2);
  }
  if (arguments.size() < 2) {
    std::cerr << "usage: generate [--tls-ca FILE] ADDRESS PROMPT [MAX_NEW_TOKENS]\n";
    return 2;
  }

  v1::GenerateRequest request;
  request.set_text(arguments[1]);
  request.mutable_sampling()->set_seed(1);
  request.mutable_sampling()->set_max_new_tokens(arguments.size() > 2 ? std::stoul(arguments[2]) : 32);

  auto stub = v1::GenerationService::NewStub(grpc::CreateChannel(arguments[0], credentials));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(5));
  auto stream = stub->GenerateStream(&context, request);
  v1::GenerateStreamResponse message;
  while (stream->Read(&message)) {
    if (message.has_chunk()) {
      std::cout << message.chunk().text() << std::flush;
    } else if (message.has_completed()) {
      const auto& statistics = message.completed().statistics();
      std::cerr << "\n" << message.completed().usage().completion_token_count() << " tokens in " << statistics.rounds()
                << " rounds, " << statistics.accepted() << " of " << statistics.drafted()
                << " draft tokens accepted\n";
    }
  }
  grpc::Status status = stream->Finish();
  if (!status.ok()) {
    std::cerr << "status " << status.error_code() << ": " << status.error_message() << "\n";
    return 1;
  }
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << "\n";
  return 1;
}
