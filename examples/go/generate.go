// Streams one completion. Usage: generate [--tls-ca FILE] ADDRESS PROMPT [MAX_NEW_TOKENS]
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"os/signal"
	"time"

	"foredraft-example/foredraftv1"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

func main() {
	log.SetFlags(0)
	tlsCA := flag.String("tls-ca", "", "authorities of the server's certificate, PEM")
	flag.Parse()
	if flag.NArg() < 2 {
		log.Fatal("usage: generate [--tls-ca FILE] ADDRESS PROMPT [MAX_NEW_TOKENS]")
	}
	sampling := &foredraftv1.Sampling{Seed: proto.Uint64(1), MaxNewTokens: proto.Uint32(32)}
	if flag.NArg() > 2 {
		_, err := fmt.Sscan(flag.Arg(2), sampling.MaxNewTokens)
		check(err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	security := grpc.WithInsecure()
	if *tlsCA != "" {
		tls, err := credentials.NewClientTLSFromFile(*tlsCA, "")
		check(err)
		security = grpc.WithTransportCredentials(tls)
		if token := os.Getenv("FOREDRAFT_TOKEN"); token != "" {
			ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
		}
	}

	connection, err := grpc.Dial(flag.Arg(0), security)
	check(err)
	request := &foredraftv1.GenerateRequest{Prompt: &foredraftv1.GenerateRequest_Text{Text: flag.Arg(1)}, Sampling: sampling}
	stream, err := foredraftv1.NewGenerationServiceClient(connection).GenerateStream(ctx, request)
	check(err)
	for message, err := stream.Recv(); err != io.EOF; message, err = stream.Recv() {
		check(err)
		if chunk := message.GetChunk(); chunk != nil {
			fmt.Print(chunk.Text)
		} else if completed := message.GetCompleted(); completed != nil {
			statistics := completed.Statistics
			log.Printf("\n%d tokens in %d rounds, %d of %d draft tokens accepted",
				completed.Usage.CompletionTokenCount, statistics.Rounds, statistics.Accepted, statistics.Drafted)
		}
	}
}

// check ends the program with the error and, if a server sent it, with what was wrong with which field.
func check(err error) {
	if err == nil {
		return
	}
	for _, detail := range status.Convert(err).Details() {
		if badRequest, ok := detail.(*errdetails.BadRequest); ok {
			for _, violation := range badRequest.FieldViolations {
				log.Printf("  %s: %s", violation.Field, violation.Description)
			}
		}
	}
	log.Fatal(err)
}
