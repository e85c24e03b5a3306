package driver

import (
	"bytes"
	"encoding/binary"
	"io"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/grpcconn"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/unixsock"
	"csi-registrar/internal/sys/worker"
)

// FuzzConnection lets a driver send any bytes at the beginning and for each of our calls: the
// report must be harmless and of limited size.
func FuzzConnection(f *testing.F) {
	good := goodBytes(f)
	settings, first, second, third := good[0], good[1], good[2], good[3]
	f.Add(settings, first, second, third)
	f.Add(settings, first, failure(3, "12", "none"), third)
	f.Add(settings, failure(1, "14", "%1b[2J run \"x | sh\""), []byte{}, []byte{})
	f.Add(settings, first, frame(7, 0, 0, make([]byte, 8)), third)
	f.Add(settings, frame(1, 4, 1, []byte{0x88, 0x3f, 0xe1, 0xff, 0x03}), frame(9, 4, 1, []byte{0x82}), frame(3, 0, 1, make([]byte, 4)))
	f.Add([]byte("HTTP/1.1 400 Bad Request\r\n\r\n"), ping, settings, settings)
	f.Fuzz(func(t *testing.T, greeting, a, b, c []byte) {
		r := askOver(t, [][]byte{greeting, a, b, c}, 10*time.Millisecond)
		switch r.Driver {
		case status.Ready:
			if r.Reason != "" || r.Identity.Name != name {
				t.Errorf("ready: %+v", r)
			}
		case status.Starting, status.Mismatch:
			if r.Reason == "" {
				t.Errorf("no reason: %+v", r)
			}
		default:
			t.Errorf("%+v", r)
		}
		if safetext.Clean(r.Reason, 1<<20) != r.Reason || utf8.RuneCountInString(r.Reason) > maxReason {
			t.Errorf("reason %q", r.Reason)
		}
		if id := r.Identity; safetext.Clean(id.Version, 1000) != id.Version || len(id.NodeID) > maxNodeID || len(id.Topology) > maxTopology || id.MaxVolumes < 0 {
			t.Errorf("identity %+v", id)
		}
	})
}

// The frames of the fuzz target's seeds are those of a driver that is ready.
func TestGoodBytes(t *testing.T) {
	if r := askOver(t, goodBytes(t), time.Minute); r.Driver != status.Ready || r.Identity.NodeID != "node-1" {
		t.Errorf("%+v", r)
	}
}

// goodBytes are the bytes that a ready driver sends at the beginning and for each call.
func goodBytes(t testing.TB) [][]byte {
	reply := func(stream uint32, m proto.Message) []byte {
		b, err := proto.Marshal(m)
		must(t, err)
		return bytes.Join([][]byte{
			frame(1, 4, stream, responseHeaders()),
			frame(0, 0, stream, append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(b))), b...)),
			frame(1, 5, stream, header("grpc-status", "0")),
		}, nil)
	}
	return [][]byte{
		frame(4, 0, 0, nil), // SETTINGS
		reply(1, &csi.GetPluginInfoResponse{Name: name, VendorVersion: "v4.2"}),
		reply(3, &csi.ProbeResponse{Ready: wrapperspb.Bool(true)}),
		reply(5, &csi.NodeGetInfoResponse{NodeId: "node-1", MaxVolumesPerNode: 7}),
	}
}

// failure is the answer that a call failed.
func failure(stream uint32, code, message string) []byte {
	return frame(1, 5, stream, slices.Concat(responseHeaders(), header("grpc-status", code), header("grpc-message", message)))
}

// responseHeaders and header are encoded by HPACK (RFC 7541): an entry of its table as a number,
// any other with its name.
func responseHeaders() []byte {
	return append([]byte{0x88, 0x5f, 16}, "application/grpc"...) // :status 200, content-type
}

func header(name, value string) []byte {
	b := append([]byte{0, byte(len(name))}, name...)
	return append(append(b, byte(len(value))), value...)
}

// frame is one of HTTP/2 (RFC 9113).
func frame(kind, flags byte, stream uint32, payload []byte) []byte {
	b := []byte{byte(len(payload) >> 16), byte(len(payload) >> 8), byte(len(payload)), kind, flags}
	return append(binary.BigEndian.AppendUint32(b, stream), payload...)
}

// askOver asks over a connection to a driver that sends the first of answers at the beginning
// and the next at each call, and hangs up when nothing comes for a while.
func askOver(t *testing.T, answers [][]byte, while time.Duration) status.Report {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	must(t, err)
	near, far := connOf(t, fds[0]), connOf(t, fds[1])
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer far.Close()
		hear(far, answers, while)
	}()
	defer func() { <-done }()
	c := New(config.Connection{Name: name, Socket: "/none", Endpoint: "/none", Timeout: 5 * time.Second, SocketOwner: "root"},
		slog.New(slog.DiscardHandler), make(box, 1), worker.NewPool())
	c.conn = &conn{target: c.socket, stream: &stream{Conn: near, hint: c.hints.Hint, budget: &c.budget}}
	c.conn.cc, err = grpcconn.New(c.conn.stream, maxMessage)
	must(t, err)
	defer c.Close()
	q := inquiry{Client: c, ctx: t.Context()}
	found := q.run(unixsock.File{})
	if found.ok() {
		found.state = status.Ready
	}
	q.Driver, q.Reason = found.state, safetext.Clean(found.reason, maxReason)
	return q.Report
}

func connOf(t *testing.T, fd int) net.Conn {
	t.Helper()
	file := os.NewFile(uintptr(fd), "socketpair")
	defer file.Close()
	c, err := net.FileConn(file)
	must(t, err)
	return c
}

// hear is the driver's end of askOver.
func hear(c net.Conn, answers [][]byte, while time.Duration) {
	preface := make([]byte, len("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
	if _, err := io.ReadFull(c, preface); err != nil || !strings.HasPrefix(string(preface), "PRI") {
		return
	}
	const call = 1 // HEADERS
	for head := []byte{3: call, 8: 0}; ; {
		if head[3] == call {
			if len(answers) == 0 {
				return
			}
			if _, err := c.Write(answers[0]); err != nil {
				return
			}
			if answers = answers[1:]; c.SetReadDeadline(time.Now().Add(while)) != nil {
				return
			}
		}
		if _, err := io.ReadFull(c, head); err != nil {
			return
		}
		size := int64(head[0])<<16 | int64(head[1])<<8 | int64(head[2])
		if _, err := io.CopyN(io.Discard, c, size); err != nil {
			return
		}
	}
}
