// Package grpcconn makes gRPC clients over connections that exist already.
package grpcconn

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
)

const (
	maxHeaders  = 16 << 10
	bufferBytes = 1 << 10  // messages are small and rare
	windowBytes = 64 << 10 // flow control: bytes in flight

	// never is longer than a connection is kept without an answer.
	never = 24 * time.Hour
)

// New returns a gRPC client over one connection. It never dials again, so that every answer
// comes from the process that was checked. An answer has at most maxMessage bytes.
func New(c net.Conn, maxMessage int) (*grpc.ClientConn, error) {
	var once sync.Once
	dial := func(context.Context, string) (net.Conn, error) {
		err := errors.New("the connection broke")
		once.Do(func() { err = nil })
		return c, err
	}
	return grpc.NewClient("passthrough:///localhost",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(dial),
		// The peer may be slow to accept; calls have their own time limits. A connection that
		// broke is not replaced: another attempt would fail in the dialer.
		grpc.WithConnectParams(grpc.ConnectParams{
			MinConnectTimeout: never,
			Backoff:           backoff.Config{BaseDelay: never, Multiplier: 1, MaxDelay: never},
		}),
		grpc.WithIdleTimeout(0), // the default closes a connection after 30 idle minutes
		grpc.WithNoProxy(),
		grpc.WithDisableServiceConfig(),
		grpc.WithDisableRetry(),
		grpc.WithDisableHealthCheck(),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)),
		grpc.WithMaxHeaderListSize(maxHeaders),
		grpc.WithReadBufferSize(bufferBytes), grpc.WithWriteBufferSize(bufferBytes),
		grpc.WithStaticStreamWindowSize(windowBytes), grpc.WithStaticConnWindowSize(windowBytes),
	)
}
