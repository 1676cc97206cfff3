// Streams one completion. Usage: node generate.js ADDRESS PROMPT [MAX_NEW_TOKENS]
// Before the first run: npm install
const path = require('node:path');
const grpc = require('@grpc/grpc-js');
const protoLoader = require('@grpc/proto-loader');

const [address, prompt, maxNewTokens = '32'] = process.argv.slice(2);
if (!address || prompt === undefined) {
  console.error('usage: node generate.js ADDRESS PROMPT [MAX_NEW_TOKENS]');
  process.exit(2);
}

const definition = protoLoader.loadSync('foredraft/v1/generation.proto', {
  includeDirs: [path.join(__dirname, '..', '..', 'protos')],
  longs: String, // the seed is an unsigned 64-bit integer
  enums: String,
  defaults: true,
  oneofs: true,
});
const { GenerationService } = grpc.loadPackageDefinition(definition).foredraft.v1;
const client = new GenerationService(address, grpc.credentials.createInsecure());

const stream = client.GenerateStream({
  text: prompt,
  sampling: { temperature: 0, maxNewTokens: Number(maxNewTokens) },
});
stream.on('data', (message) => {
  if (message.event === 'chunk') {
    process.stdout.write(message.chunk.text);
  } else if (message.event === 'completed') {
    const { finishReason, usage, statistics } = message.completed;
    console.error(
      `\n${finishReason}: ${usage.completionTokenCount} tokens in ${statistics.rounds} rounds, ` +
        `${statistics.accepted} of ${statistics.drafted} draft tokens accepted`
    );
  }
});
stream.on('error', (error) => {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
});
stream.on('end', () => client.close());
