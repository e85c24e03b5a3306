package driver

import (
	"context"
	"fmt"
	"net"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
)

// What one answer may hold. The kubelet itself allows 16 MB; a GetPluginInfo or
// NodeGetInfo has a few hundred bytes.
const (
	maxMessage = 256 << 10
	maxHeaders = 16 << 10
)

// never is longer than any connection is kept without an answer (maxSilence).
const never = 24 * time.Hour

// talk is gRPC over one link, and over that alone: when it breaks, nothing dials again.
type talk struct {
	link  *link
	cc    *grpc.ClientConn
	known bool // a round of questions was asked over it
	begun time.Time
	heard atomic.Int64 // nanoseconds from begun to the last answer
}

// hear notes that there was an answer.
func (t *talk) hear() { t.heard.Store(int64(time.Since(t.begun))) }

// silence is how long ago the last answer came, or the beginning.
func (t *talk) silence() time.Duration {
	return time.Since(t.begun) - time.Duration(t.heard.Load())
}

func newTalk(l *link) (*talk, error) {
	var taken atomic.Bool
	cc, err := grpc.NewClient("passthrough:///localhost",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
			if taken.Swap(true) {
				return nil, fmt.Errorf("the connection broke")
			}
			return l, nil
		}),
		// A driver may take its time to accept; our own calls have their time limits. And
		// what broke stays so: gRPC's own next try would only find the dialer empty.
		grpc.WithConnectParams(grpc.ConnectParams{
			MinConnectTimeout: never,
			Backoff:           backoff.Config{BaseDelay: never, Multiplier: 1, MaxDelay: never},
		}),
		grpc.WithNoProxy(),
		grpc.WithDisableServiceConfig(),
		grpc.WithDisableRetry(),
		grpc.WithDisableHealthCheck(),
		grpc.WithIdleTimeout(0),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)),
		grpc.WithMaxHeaderListSize(maxHeaders),
		// Small messages, seldom: no buffers of 32 kB, no estimating of bandwidth.
		grpc.WithReadBufferSize(0),
		grpc.WithWriteBufferSize(4<<10),
		grpc.WithStaticStreamWindowSize(64<<10),
		grpc.WithStaticConnWindowSize(64<<10),
	)
	if err != nil {
		l.end()
		return nil, fmt.Errorf("cannot speak gRPC: %w", err)
	}
	return &talk{link: l, cc: cc, begun: time.Now()}, nil
}

func (t *talk) close() {
	t.link.ours.Store(true)
	t.cc.Close() // fails only if it was closed before
	t.link.end() // if gRPC never came to take it
}

// rest closes gRPC, and keeps the connection.
func (t *talk) rest() { t.link.lay(func() { t.cc.Close() }) }

// persist calls until there is an answer, for limit at most. While a call is unanswered
// another one is made each second, so that a driver which lost the first, but is well now,
// is heard within a second; the first one goes on, for a driver that is only slow. It
// returns when all calls have returned.
func persist[T any](ctx context.Context, limit time.Duration, call func(context.Context) (T, error)) (T, error) {
	type answer struct {
		value T
		err   error
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	var (
		answers = make(chan answer, 1) // the first one counts
		ended   = make(chan struct{})
		running = 0
	)
	begin := func(own context.Context, done func(), say bool) {
		running++
		go func() {
			v, err := call(own)
			// A call that we gave up says nothing of the driver.
			if err == nil || own.Err() == nil || say {
				select {
				case answers <- answer{v, err}:
				default:
				}
			}
			done()
			ended <- struct{}{}
		}()
	}
	defer func() {
		cancel()
		for range running {
			<-ended
		}
	}()
	begin(ctx, func() {}, true)
	again := time.NewTicker(time.Second)
	defer again.Stop()
	for {
		select {
		case a := <-answers:
			return a.value, a.err
		case <-ended:
			running--
		case <-again.C:
			// Given up by us, not by a deadline: that would be sent along, and a driver that
			// is a little faster than our clock would answer with it.
			quick, giveUp := context.WithCancel(ctx)
			timer := time.AfterFunc(time.Second, giveUp)
			begin(quick, func() { timer.Stop(); giveUp() }, false)
		}
	}
}
