package fake

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A call is made in a bubble without a socket.
func TestDriverAnswersAsItIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := NewDriver("", Healthy("a.example"))
		ask := func(ctx context.Context) error {
			_, err := d.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
			return err
		}
		if err := ask(t.Context()); err != nil {
			t.Error(err)
		}
		d.Set(func(a *Answers) { a.Delay = map[string]time.Duration{NodeGetInfo: time.Minute} })
		began := time.Now()
		if err := ask(t.Context()); err != nil || time.Since(began) != time.Minute {
			t.Errorf("%v after %v", err, time.Since(began))
		}
		d.Set(func(a *Answers) { a.Delay, a.Hang = nil, map[string]bool{NodeGetInfo: true} })
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		if err := ask(ctx); status.Code(err) != codes.DeadlineExceeded {
			t.Errorf("a hanging call: %v", err)
		}
		go func() {
			time.Sleep(time.Second)
			d.Set(func(a *Answers) {
				a.Hang, a.Fail = nil, map[string]error{NodeGetInfo: status.Error(codes.Internal, "x")}
			})
		}()
		if err := ask(t.Context()); status.Code(err) != codes.Internal {
			t.Errorf("a call that hung: %v", err)
		}
		if n := d.Calls(NodeGetInfo); n != 4 {
			t.Errorf("%d calls", n)
		}
	})
}

func TestDriverLeavesItsSocketOnlyWhenKilled(t *testing.T) {
	d := startDriver(t)
	d.Kill()
	if _, err := os.Lstat(d.Socket); err != nil {
		t.Error(err)
	}
	if err := d.HangUp(); err != nil {
		t.Fatal(err)
	}
	if err := d.Serve(); err != nil {
		t.Fatal(err)
	}
	if err := d.Stop(); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(d.Socket); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
}
