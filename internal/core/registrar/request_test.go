package registrar

import (
	"errors"
	"log/slog"
	"testing"
	"time"

	"csi-registrar/internal/node/status"
)

// A request ends when its driver goes: it is no reason to register the driver once more when it
// returns, nor to show its registration as pending meanwhile.
func TestRequestEndsWithItsDriver(t *testing.T) {
	runHarness(t, readyWorld(), base, func(h *harness) {
		time.Sleep(time.Minute)
		h.w.mu.Lock()
		h.w.publishErr = errFull
		h.w.mu.Unlock()
		if err := h.reg.Reregister(h.Context(), false); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		h.w.set(func(w *world) {
			w.report, w.publishErr = status.Report{Driver: status.Absent, Reason: "gone"}, nil
		})
		time.Sleep(time.Minute)
		if s := h.status(); s.Registration != status.Registered {
			t.Errorf("registration %q", s.Registration)
		}
		h.w.set(func(w *world) { w.report = ready() })
		time.Sleep(time.Minute)
		h.publications(1)
	})
}

// seenDriver is a driver of which only the view is known.
type seenDriver struct {
	*world
	view status.View
}

func (d *seenDriver) Look() status.View              { return d.view }
func (*seenDriver) AskNow()                          {}
func (*seenDriver) Follow(bool, bool, time.Duration) {}

// The registrar may not have looked while the driver was gone.
func TestRequestEndsWithARestartOfItsDriver(t *testing.T) {
	d := &seenDriver{newWorld(), status.View{ReadySince: time.Now()}}
	d.view.Driver = status.Ready
	r := New(base, d, fakeSocket{d.world}, slog.New(slog.DiscardHandler), func(status.Driver) {})
	r.request = pendingRequest{CauseAsked, time.Now()}
	if r.lookAtDriver(status.Socket{}, time.Now()); r.request.cause != CauseAsked {
		t.Error("the request ended without a restart")
	}
	d.view.ReadySince = d.view.ReadySince.Add(time.Second)
	if r.lookAtDriver(status.Socket{}, time.Now()); r.request.cause != "" {
		t.Error("the request outlived its driver")
	}
}

// TestUpdateBeforeTheKubeletAnswers checks that a changed table causes no publication if it changes
// nothing of what is announced, and the kubelet has not refused that.
func TestUpdateBeforeTheKubeletAnswers(t *testing.T) {
	w := readyWorld()
	w.accept = nil
	runHarness(t, w, base, func(h *harness) {
		h.publications(1)
		table := base
		table.ProbeEvery = time.Minute
		if err := h.reg.Update(h.Context(), table, nil); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		h.publications(1)
	})
}

// After a start with an adopted registration that the kubelet refused, the first answer of a
// driver that is ready is no return.
func TestRefusedIsNotPublishedAtTheStart(t *testing.T) {
	w := readyWorld()
	w.takes = time.Second
	runHarness(t, w, base, func(h *harness) {
		h.w.mu.Lock()
		h.w.sock = status.Socket{
			Path: "/reg/foo-reg.sock", Place: status.Ours, Up: true,
			Publication: status.Publication{
				PublishedAt: time.Now().Add(-time.Minute), GetInfoAt: time.Now().Add(-time.Minute),
				Announced:    status.Announcement{Endpoint: base.Endpoint, Versions: base.SupportedVersions, Identity: ready().Identity},
				Notification: status.Notification{At: time.Now().Add(-time.Minute), Error: "no"},
			},
		}
		h.w.mu.Unlock()
		time.Sleep(20 * time.Second)
		h.state("refused")
		h.publications(0)
	})
}

// A disk hangs at the start, a user requests a registration, the disk answers, and the socket of
// the earlier process is adopted: by a Check, or by the try to publish. That is not what was
// requested.
func TestRequestBeforeALateAdoption(t *testing.T) {
	for _, byPublish := range []bool{false, true} {
		w := readyWorld()
		w.publishErr = errFull
		runHarness(t, w, base, func(h *harness) {
			time.Sleep(time.Minute)
			if err := h.reg.Reregister(h.Context(), false); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Second)
			adopt := func(w *world) {
				at := time.Now().Add(-time.Hour)
				w.publishErr = nil
				w.sock = status.Socket{Path: w.sock.Path, Place: status.Ours, Up: true, Adopted: true, Publication: status.Publication{
					Announced: status.Announcement{Endpoint: base.Endpoint, Versions: base.SupportedVersions, Identity: ready().Identity}, PublishedAt: at,
					Notification: status.Notification{At: at, Registered: true},
				}}
			}
			if !byPublish {
				h.w.set(adopt)
			} else {
				h.w.mu.Lock()
				tries := 0
				h.w.onPublish = func() {
					if tries++; tries == 1 {
						adopt(h.w)
						h.w.publishErr = errors.New("adopted late")
					} else {
						h.w.publishErr = nil
					}
				}
				h.w.mu.Unlock()
			}
			time.Sleep(2 * time.Minute)
			h.publications(1)
			if s := h.status(); s.Registration != status.Registered || s.Republications != 1 {
				t.Errorf("%s, %d republications", s.Registration, s.Republications)
			}
		})
	}
}
