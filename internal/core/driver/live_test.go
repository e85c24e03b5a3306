package driver

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"

	"csi-registrar/internal/sys/worker"
	"csi-registrar/internal/test/fake"
)

// TestLive has the results of kubernetes-csi/livenessprobe for one Probe.
func TestLive(t *testing.T) {
	const secret = "token=hunter2"
	for name, c := range map[string]struct {
		set  func(*fake.Answers)
		want string // a part of the error; empty: live
	}{
		"healthy":       {func(*fake.Answers) {}, ""},
		"not ready":     {func(a *fake.Answers) { a.NotReady = true }, "not ready"},
		"unimplemented": {func(a *fake.Answers) { a.Fail = failing(codes.Unimplemented, secret) }, "Unimplemented"},
		"unavailable":   {func(a *fake.Answers) { a.Fail = failing(codes.Unavailable, secret) }, "Unavailable"},
		"its own deadline": {func(a *fake.Answers) { a.Fail = failing(codes.DeadlineExceeded, secret) },
			"the error DeadlineExceeded"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			answers := fake.Healthy("a.example")
			c.set(&answers)
			d := startFake(t, answers)
			err := Live(t.Context(), worker.NewPool(), "root", d.Socket)
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
			if err != nil && strings.Contains(err.Error(), secret) {
				t.Errorf("%q repeats what the driver said", err)
			}
		})
	}
}

func TestADriverThatHangsIsNotLive(t *testing.T) {
	t.Parallel()
	d := startFake(t, fake.Healthy("a.example"))
	d.Set(func(a *fake.Answers) { a.Hang = map[string]bool{fake.Probe: true} })
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := Live(ctx, worker.NewPool(), "root", d.Socket); err == nil || !strings.Contains(err.Error(), "does not answer Probe") {
		t.Errorf("%v", err)
	}
}

func TestNobodyIsNotLive(t *testing.T) {
	err := Live(t.Context(), worker.NewPool(), "root", filepath.Join(fake.ShortDir(t), "none"))
	if !errors.Is(err, ErrAbsent) {
		t.Errorf("%v", err)
	}
}

func TestLiveName(t *testing.T) {
	d := startFake(t, fake.Healthy("a.example"))
	if name, err := LiveName(t.Context(), worker.NewPool(), "root", d.Socket); name != "a.example" || err != nil {
		t.Errorf("%q, %v", name, err)
	}
	d.Set(func(a *fake.Answers) { a.Name = "Under_score!" })
	if _, err := LiveName(t.Context(), worker.NewPool(), "root", d.Socket); err == nil {
		t.Error("a name that the kubelet refuses is taken")
	}
}

func failing(code codes.Code, text string) map[string]error {
	return map[string]error{fake.Probe: grpcstatus.Error(code, text)}
}

func startFake(t *testing.T, a fake.Answers) *fake.Driver {
	t.Helper()
	d := fake.NewDriver(filepath.Join(fake.ShortDir(t), "csi.sock"), a)
	if _, err := d.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Stop(); err != nil {
			t.Error(err)
		}
	})
	return d
}
