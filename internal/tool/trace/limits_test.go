package trace

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"golang.org/x/net/http2"
)

// TestLostConnectionIsNeverIdle checks that a connection of which bytes are missing is not closed
// at the end of the trace as one without a call: that cannot be known.
func TestLostConnectionIsNeverIdle(t *testing.T) {
	c := newConnection(NewRecorder(nil))
	c.copied = time.Now().Add(-time.Hour)
	if !c.idle() {
		t.Error("it has no call")
	}
	c.decoder = nil
	if c.idle() {
		t.Error("it may have a call")
	}
}

// TestRememberedAttempts checks that the memory for repeated calls is limited.
func TestRememberedAttempts(t *testing.T) {
	r := NewRecorder(nil)
	for i := range 3 * maxRemembered {
		c := &call{id: fmt.Sprint(i)}
		if r.ask(c); c.Attempt != 1 || len(r.attempts) > maxRemembered {
			t.Fatalf("attempt %d, %d remembered", c.Attempt, len(r.attempts))
		}
	}
}

// TestMethodsOfTheSummary checks that only further methods share a line.
func TestMethodsOfTheSummary(t *testing.T) {
	r := NewRecorder(nil)
	for i := range maxMethods + 2 {
		r.count(&call{Call: Call{Method: fmt.Sprint("m", i)}})
	}
	r.count(&call{Call: Call{Method: "m0"}})
	if len(r.methods) != maxMethods+1 || r.methods[otherMethods].calls != 2 || r.methods["m0"].calls != 2 {
		t.Errorf("%d methods, %+v, %+v", len(r.methods), r.methods["m0"], r.methods[otherMethods])
	}
}

// TestLostCallHasNotTimedOut checks that a call whose end is not in the record is not said to have
// reached its caller's limit.
func TestLostCallHasNotTimedOut(t *testing.T) {
	for end, want := range map[End]End{Lost: Lost, Cancelled: TimedOut, Reset: TimedOut, Answered: Answered} {
		c := newCall("/csi.v1.Node/NodePublishVolume", time.Unix(1e9, 0))
		c.limit = time.Second
		c.setOutcome(end, c.began.Add(c.limit), nil)
		if c.End != want {
			t.Errorf("%s is shown as %s", end, c.End)
		}
	}
}

// TestCutCharacter checks that a text is not cut within a character.
func TestCutCharacter(t *testing.T) {
	if got := cut("x" + strings.Repeat("ä", maxShownText)); !utf8.ValidString(got) || len(got) < maxShownText {
		t.Errorf("%d bytes, valid: %t", len(got), utf8.ValidString(got))
	}
}

// TestLargestFrame checks the limit of a frame: 64 KiB.
func TestLargestFrame(t *testing.T) {
	for _, length := range []int{maxFrame, maxFrame + 1} {
		var s side
		s.buf.Write([]byte{byte(length >> 16), byte(length >> 8), byte(length), 0, 0, 0, 0, 0, 1, 0})
		if whole, err := s.whole(); whole || (err == nil) != (length <= maxFrame) {
			t.Errorf("%d bytes: %t, %v", length, whole, err)
		}
	}
}

// TestSmallerHeaderTable checks that one end may go on with the table of headers that it had before
// the other end limits it.
func TestSmallerHeaderTable(t *testing.T) {
	ask, answer := newWire(http2.ClientPreface), newWire("")
	if err := errors.Join(ask.framer.WriteSettings(), answer.framer.WriteSettings(http2.Setting{ID: http2.SettingHeaderTableSize, Val: 100})); err != nil {
		t.Fatal(err)
	}
	ask.encoder.SetMaxDynamicTableSize(2000)
	ask.ask(t, 1, "/csi.v1.Node/NodePublishVolume", publish("v", "/t"))
	rec := NewRecorder(nil)
	decodeInPieces(rec, copyBuffer, ask.Bytes(), answer.Bytes())
	if len(rec.running) != 0 || rec.notDecoded != 0 || rec.methods["csi.v1.Node/NodePublishVolume"] == nil {
		t.Errorf("left out: %+v, seen: %v", rec.notDecoded+rec.notWritten, rec.methods)
	}
}

// fullListener has no descriptor for the first connection.
type fullListener struct {
	*net.UnixListener
	failed atomic.Bool
}

func (l *fullListener) Accept() (net.Conn, error) {
	if !l.failed.Swap(true) {
		return nil, &net.OpError{Op: "accept", Err: os.NewSyscallError("accept4", syscall.EMFILE)}
	}
	return l.UnixListener.Accept()
}

// TestServeWithoutDescriptors checks that a shortage that ends does not end the trace.
func TestServeWithoutDescriptors(t *testing.T) {
	path := filepath.Join(socketDir(t), "t")
	rec := NewRecorder(nil)
	ctx, stop := context.WithCancel(t.Context())
	l := &fullListener{UnixListener: listen(t, path)}
	client, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	dial := func(context.Context) (Conn, error) { stop(); return nil, errors.New("no driver") }
	if err := Serve(ctx, t.Context(), l, dial, rec); err != nil || rec.dialFailures != 1 {
		t.Errorf("%v, %d connections", err, rec.dialFailures)
	}
}
