package systemd

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
)

// fakeBus answers calls on a socket. Real ones are asked in the system test.
type fakeBus struct {
	t      *testing.T
	answer func(call string) message // body of the reply; nil hangs up; refusal() refuses
	mu     sync.Mutex
	calls  []string
}

const refused = "refused"

func refusal() message { return message(refused) }

func startBus(t *testing.T, path string, answer func(string) message) *fakeBus {
	f := &fakeBus{t: t, answer: answer}
	l := listen(t, path)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { f.serve(c) })
		}
	})
	t.Cleanup(func() { l.Close(); wg.Wait() })
	return f
}

func (f *fakeBus) serve(c net.Conn) {
	defer c.Close()
	in := bufio.NewReader(c)
	if line, err := in.ReadString('\n'); err != nil || !strings.HasPrefix(line, "\x00AUTH EXTERNAL 3") {
		f.t.Errorf("%q, %v", line, err)
		return
	}
	io.WriteString(c, "OK 0123456789abcdef\r\n")
	if line, err := in.ReadString('\n'); err != nil || line != "BEGIN\r\n" {
		return // the client gave up
	}
	for {
		serial, call, err := readCall(in)
		if err != nil {
			return
		}
		f.mu.Lock()
		f.calls = append(f.calls, call)
		f.mu.Unlock()
		body := f.answer(call)
		if body == nil {
			return
		}
		// A signal first, which is nobody's answer.
		c.Write(written(4, 0, nil))
		if string(body) == refused {
			var text message
			text.string("no such thing")
			c.Write(written(typeError, serial, text))
			continue
		}
		c.Write(written(typeReply, serial, body))
	}
}

func written(kind byte, to uint32, body message) message {
	m := message{'l', kind, 0, 1}
	m.uint32(uint32(len(body)))
	m.uint32(77)
	m.uint32(0)
	if kind == typeError {
		m.field(fieldErrorName, 's', "org.example.No")
	}
	m.field(fieldSignature, 'g', "v")
	m.align(8)
	m = append(m, fieldReplySerial, 1, 'u', 0)
	m.uint32(to)
	binary.LittleEndian.PutUint32(m[12:], uint32(len(m)-16))
	m.align(8)
	return append(m, body...)
}

// readCall reads one call as "path interface.member args".
func readCall(in io.Reader) (serial uint32, call string, err error) {
	var head [16]byte
	if _, err := io.ReadFull(in, head[:]); err != nil {
		return 0, "", err
	}
	le := binary.LittleEndian
	fields := make([]byte, (le.Uint32(head[12:])+7)/8*8)
	body := make([]byte, le.Uint32(head[4:]))
	for _, part := range [][]byte{fields, body} {
		if _, err := io.ReadFull(in, part); err != nil {
			return 0, "", err
		}
	}
	f := &reply{order: le, body: fields[:le.Uint32(head[12:])]}
	var path, face, member, signature string
	for f.at < len(f.body) && f.err == nil {
		f.align(8)
		switch code, kind := f.byte(), f.signature(); {
		case kind == "g":
			signature = f.signature()
		case code == fieldPath:
			path = f.string()
		case code == fieldInterface:
			face = f.string()
		case code == fieldMember:
			member = f.string()
		default:
			f.string()
		}
	}
	call = path + " " + face + "." + member
	b := &reply{order: le, body: body}
	for _, kind := range signature {
		if kind == 's' {
			call += " " + b.string()
		} else {
			call += fmt.Sprintf(" %d", b.uint32())
		}
	}
	return le.Uint32(head[8:]), call, errors.Join(f.err, b.err)
}

func variant(kind string, write func(*message)) message {
	m := message{byte(len(kind))}
	m = append(append(m, kind...), 0)
	write(&m)
	return m
}

func text(s string) message {
	var m message
	m.string(s)
	return m
}

func jobVariant(id uint32, path string) message {
	return variant("(uo)", func(m *message) { m.align(8); m.uint32(id); m.string(path) })
}

// unitBus answers for the unit x.service with that job, and fails the test on other calls.
func unitBus(t *testing.T, id uint32, jobType func() message) func(string) message {
	return func(call string) message {
		switch {
		case strings.HasSuffix(call, "GetUnit x.service"), strings.HasSuffix(call, "GetUnitByPID "+pid()):
			return text("/unit")
		case call == "/unit org.freedesktop.DBus.Properties.Get org.freedesktop.systemd1.Unit Job":
			return jobVariant(id, "/job/7")
		case call == "/job/7 org.freedesktop.DBus.Properties.Get org.freedesktop.systemd1.Job JobType":
			return jobType()
		case strings.HasSuffix(call, "Service NFileDescriptorStore"):
			return variant("u", func(m *message) { m.uint32(3) })
		case strings.HasSuffix(call, "Service FileDescriptorStoreMax"):
			return variant("u", func(m *message) { m.uint32(512) })
		case strings.HasSuffix(call, ".Hello"):
			return text(":1.5")
		}
		return refusal()
	}
}

func sayStop() message { return variant("s", func(m *message) { m.string("stop") }) }

func TestJob(t *testing.T) {
	dir := shortDir(t)
	for i, c := range []struct {
		name string
		unit string
		id   uint32
		want string
	}{
		{"a stop", "x.service", 7, "stop"},
		{"our own", "", 7, "stop"},
		{"none", "x.service", 0, ""},
	} {
		m := manager{booted: "/", private: filepath.Join(dir, fmt.Sprint(i))}
		startBus(t, m.private, unitBus(t, c.id, sayStop))
		if got, err := m.job(t.Context(), c.unit); got != c.want || err != nil {
			t.Errorf("%s: %q, %v", c.name, got, err)
		}
	}
}

// TestDown: a unit that is inactive only until its start job runs is not down.
func TestDown(t *testing.T) {
	dir := shortDir(t)
	for i, c := range []struct {
		state string
		id    uint32
		want  bool
	}{
		{"inactive", 0, true},
		{"failed", 0, true},
		{"inactive", 7, false},
		{"activating", 0, false},
		{"active", 0, false},
	} {
		m := manager{booted: "/", private: filepath.Join(dir, fmt.Sprint(i))}
		answer := unitBus(t, c.id, sayStop)
		startBus(t, m.private, func(call string) message {
			if strings.HasSuffix(call, "systemd1.Unit ActiveState") {
				return variant("s", func(m *message) { m.string(c.state) })
			}
			return answer(call)
		})
		if got, err := m.down(t.Context(), "x.service"); got != c.want || err != nil {
			t.Errorf("%+v: %t, %v", c, got, err)
		}
	}
	m := manager{booted: "/", private: filepath.Join(dir, "refuses")}
	startBus(t, m.private, func(string) message { return refusal() })
	if got, err := m.down(t.Context(), "x.service"); got || err == nil {
		t.Errorf("nobody to ask: %t, %v", got, err)
	}
}

func TestJobThroughTheBroker(t *testing.T) {
	dir := shortDir(t)
	m := manager{booted: "/", private: filepath.Join(dir, "none"), broker: filepath.Join(dir, "b")}
	f := startBus(t, m.broker, unitBus(t, 7, sayStop))
	if got, err := m.job(t.Context(), "x.service"); got != "stop" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	if len(f.calls) != 4 || !strings.HasSuffix(f.calls[0], "Hello") {
		t.Errorf("calls %q", f.calls)
	}
}

// TestJobIsAskedAgain: a manager that hangs up, and a job that ends between two questions.
func TestJobIsAskedAgain(t *testing.T) {
	m := manager{booted: "/", private: filepath.Join(shortDir(t), "b")}
	var tries atomic.Int32
	startBus(t, m.private, unitBus(t, 7, func() message {
		switch tries.Add(1) {
		case 1:
			return nil
		case 2:
			return refusal()
		}
		return sayStop()
	}))
	if got, err := m.job(t.Context(), ""); got != "stop" || err != nil || tries.Load() != 3 {
		t.Errorf("%q, %v, %d tries", got, err, tries.Load())
	}
}

func TestJobCannotBeAsked(t *testing.T) {
	dir := shortDir(t)
	if _, err := (manager{booted: dir + "/no"}).job(t.Context(), ""); err == nil {
		t.Error("no systemd: no error")
	}
	m := manager{booted: "/", private: filepath.Join(dir, "b")}
	startBus(t, m.private, func(string) message { return refusal() })
	_, err := m.job(t.Context(), "other.service")
	if remote := (*remoteError)(nil); !errors.As(err, &remote) || remote.name != "org.example.No" || remote.text != "no such thing" {
		t.Error(err)
	}
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	if _, err := (manager{booted: "/", private: dir + "/none", broker: dir + "/none"}).job(ctx, ""); !errors.Is(err, cause) {
		t.Error(err)
	}
}

func TestStoreCount(t *testing.T) {
	m := manager{booted: "/", private: filepath.Join(shortDir(t), "b")}
	startBus(t, m.private, unitBus(t, 0, nil))
	if stored, most, err := m.storeCount(t.Context()); stored != 3 || most != 512 || err != nil {
		t.Error(stored, most, err)
	}
}

// TestReadReply: bytes as another implementation writes them (big endian), and broken ones.
func TestReadReply(t *testing.T) {
	good := []byte("B\x02\x01\x01" + "\x00\x00\x00\x09" + "\x00\x00\x00\x05" + "\x00\x00\x00\x0f" +
		"\x05\x01u\x00\x00\x00\x00\x02" + "\x08\x01g\x00\x01s\x00" + "\x00" +
		"\x00\x00\x00\x04stop\x00")
	r, err := readReply(bytes.NewReader(good))
	if err != nil || r.to != 2 || r.kind != typeReply || r.string() != "stop" || r.err != nil {
		t.Errorf("%+v, %v", r, err)
	}
	for n := range good {
		if _, err := readReply(bytes.NewReader(good[:n])); err == nil {
			t.Errorf("cut at %d: no error", n)
		}
	}
}

func FuzzReadReply(f *testing.F) {
	f.Add([]byte(written(typeReply, 1, jobVariant(7, "/job/7"))))
	f.Add([]byte(written(typeError, 1, text("no"))))
	f.Fuzz(func(t *testing.T, b []byte) {
		if r, err := readReply(bytes.NewReader(b)); err == nil {
			r.signature()
			r.align(8)
			r.uint32()
			_ = r.string()
		}
	})
}
