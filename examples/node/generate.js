// Streams one completion. Usage: node generate.js [--tls-ca FILE] ADDRESS PROMPT [MAX_NEW_TOKENS]
const fs = require('node:fs');
const path = require('node:path');
const { parseArgs } = require('node:util');
const grpc = require('@grpc/grpc-js');
const protoLoader = require('@grpc/proto-loader');

const { values: options, positionals } = parseArgs({
  options: { 'tls-ca': { type: 'string' } },
  allowPositionals: true,
});
const [address, prompt, maxNewTokens = '32'] = positionals;
if (!address || prompt === undefined) {
  console.error('usage: node generate.js [--tls-ca FILE] ADDRESS PROMPT [MAX_NEW_TOKENS]');
  process.exit(2);
}

const definition = protoLoader.loadSync(
  ['foredraft/v1/generation.proto', 'google/rpc/status.proto', 'google/rpc/error_details.proto'],
  {
    includeDirs: [
      path.join(__dirname, '..', '..', 'protos'),
      path.dirname(require.resolve('google-proto-files/package.json')),
    ],
    longs: String, // the seed is an unsigned 64-bit integer
    enums: String,
    defaults: true,
    oneofs: true,
  }
);
const { GenerationService } = grpc.loadPackageDefinition(definition).foredraft.v1;

let credentials = grpc.credentials.createInsecure();
if (options['tls-ca']) {
  credentials = grpc.credentials.createSsl(fs.readFileSync(options['tls-ca']));
  const token = process.env.FOREDRAFT_TOKEN;
  if (token) {
    const metadata = new grpc.Metadata();
    metadata.set('authorization', `Bearer ${token}`);
    const bearer = grpc.credentials.createFromMetadataGenerator((_, callback) => callback(null, metadata));
    credentials = grpc.credentials.combineChannelCredentials(credentials, bearer);
  }
}

const client = new GenerationService(address, credentials);
const stream = client.GenerateStream(
  { text: prompt, sampling: { seed: 1, maxNewTokens: Number(maxNewTokens) } },
  { deadline: Date.now() + 300_000 }
);
process.once('SIGINT', () => stream.cancel());
stream.on('data', (message) => {
  if (message.event === 'chunk') {
    process.stdout.write(message.chunk.text);
  } else if (message.event === 'completed') {
    const { usage, statistics } = message.completed;
    console.error(
      `\n${usage.completionTokenCount} tokens in ${statistics.rounds} rounds, ` +
        `${statistics.accepted} of ${statistics.drafted} draft tokens accepted`
    );
  }
});
stream.on('error', (error) => {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  for (const status of error.metadata.get('grpc-status-details-bin')) {
    for (const detail of definition['google.rpc.Status'].deserialize(status).details) {
      if (detail.type_url !== 'type.googleapis.com/google.rpc.BadRequest') continue;
      for (const violation of definition['google.rpc.BadRequest'].deserialize(detail.value).fieldViolations) {
        console.error(`  ${violation.field}: ${violation.description}`);
      }
    }
  }
  process.exitCode = 1;
});
stream.on('end', () => client.close());
