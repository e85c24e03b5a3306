package systemd

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"log/slog"
	"maps"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/coreos/go-systemd/v22/journal"
	"golang.org/x/sys/unix"

	"csi-registrar/internal/sys/logqueue"
	"csi-registrar/internal/test/fake"
)

type entry struct {
	text     string
	priority journal.Priority
	fields   map[string]string
}

// fakeJournal returns a handler whose entries are kept, after each error of fail.
func fakeJournal(t *testing.T, stderr io.Writer, fail ...error) (*[]entry, *journalHandler) {
	var got []entry
	return &got, &journalHandler{
		JournalOptions: JournalOptions{
			Level: slog.LevelInfo, Stderr: stderr, Refused: func() {},
			Sink: func(w logqueue.Write) { w(t.Context()) },
		},
		send: func(b []byte) error {
			if len(fail) > 0 {
				err := fail[0]
				fail = fail[1:]
				return err
			}
			got = append(got, decode(t, b))
			return nil
		},
	}
}

// decode reads an entry in the native protocol.
func decode(t *testing.T, b []byte) entry {
	t.Helper()
	e := entry{fields: map[string]string{}}
	for len(b) > 0 {
		line, rest, _ := bytes.Cut(b, []byte("\n"))
		name, value, ok := strings.Cut(string(line), "=")
		if !ok {
			size := binary.LittleEndian.Uint64(rest)
			value, rest = string(rest[8:8+size]), rest[8+size+1:]
		}
		switch b = rest; name {
		case "MESSAGE":
			e.text = value
		case "PRIORITY":
			n, err := strconv.Atoi(value)
			if err != nil {
				t.Error(err)
			}
			e.priority = journal.Priority(n)
		default:
			e.fields[name] = value
		}
	}
	return e
}

func TestJournalHandler(t *testing.T) {
	got, h := fakeJournal(t, io.Discard)
	log := slog.New(h).With("driver", "nfs.csi.k8s.io")
	log.Info("registered", "MESSAGE_ID", "0123456789abcdef0123456789abcdef", "took", 120*time.Millisecond)
	log.Debug("too low")
	log.Warn("refused", "error", `no "x" here`, "Node-Id", 7, "none", "")
	log.Error("broken", "a b", "c")
	log.With("state", "x").WithGroup("ignored").Log(t.Context(), slog.LevelError+4, "worse")
	want := []entry{
		{"registered driver=nfs.csi.k8s.io took=120ms", journal.PriInfo,
			map[string]string{"MESSAGE_ID": "0123456789abcdef0123456789abcdef", "CSI_DRIVER": "nfs.csi.k8s.io", "CSI_TOOK": "120ms"}},
		{`refused driver=nfs.csi.k8s.io error="no \"x\" here" Node-Id=7 none=""`, journal.PriWarning,
			map[string]string{"CSI_DRIVER": "nfs.csi.k8s.io", "CSI_ERROR": `no "x" here`, "CSI_NODE_ID": "7", "CSI_NONE": ""}},
		{`broken driver=nfs.csi.k8s.io "a b"=c`, journal.PriErr, map[string]string{"CSI_DRIVER": "nfs.csi.k8s.io", "CSI_A_B": "c"}},
		{`worse driver=nfs.csi.k8s.io state=x`, journal.PriErr, map[string]string{"CSI_DRIVER": "nfs.csi.k8s.io", "CSI_STATE": "x"}},
	}
	if len(*got) != len(want) {
		t.Fatalf("%d entries: %v", len(*got), *got)
	}
	for i, w := range want {
		w.fields["SYSLOG_IDENTIFIER"] = "csi-registrar"
		if g := (*got)[i]; g.text != w.text || g.priority != w.priority || !maps.Equal(g.fields, w.fields) {
			t.Errorf("got  %+v\nwant %+v", g, w)
		}
	}
}

// TestJournalHandlersDoNotShare: two loggers made of one must not write into each
// other's attributes.
func TestJournalHandlersDoNotShare(t *testing.T) {
	got, h := fakeJournal(t, io.Discard)
	base := slog.New(h).With("a", 1).With("b", 2).With("c", 3)
	one, two := base.With("x", "one"), base.With("x", "two")
	one.Info("1", "y", 1)
	two.Info("2", "y", 2)
	if (*got)[0].fields["CSI_X"] != "one" || (*got)[1].fields["CSI_X"] != "two" {
		t.Error(*got)
	}
}

func TestJournalFallsBack(t *testing.T) {
	var out bytes.Buffer
	refused := 0
	_, h := fakeJournal(t, &out, unix.ECONNREFUSED)
	h.Refused = func() { refused++ }
	slog.New(h).With("driver", "d").Warn("registered", "k", "v")
	if want := "<4>registered driver=d k=v journal_error=\"connection refused\"\n"; out.String() != want || refused != 1 {
		t.Errorf("%q, want %q; refused %d times", out.String(), want, refused)
	}
}

// TestJournalWaitsForRoom: an entry is sent when journald reads again, once, and says how late it
// is.
func TestJournalWaitsForRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		full := slices.Repeat([]error{unix.EAGAIN}, 30)
		got, h := fakeJournal(t, &out, full...)
		slog.New(h).Info("registered")
		if len(*got) != 1 || (*got)[0].fields["CSI_DELAYED"] != "3s" || out.Len() > 0 {
			t.Errorf("%+v, and on standard error %q", *got, out.String())
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, h = fakeJournal(t, &out, slices.Repeat([]error{unix.EAGAIN}, 1000)...)
		h.Sink = func(w logqueue.Write) { w(ctx) }
		begun := time.Now()
		slog.New(h).Info("registered")
		if took := time.Since(begun); took != time.Second || out.Len() > 0 {
			t.Errorf("gave up after %s, want the end of the context; on standard error %q", took, out.String())
		}
	})
}

func TestEncode(t *testing.T) {
	e := decode(t, encode(journal.PriErr, "two\nlines", map[string]string{"CSI_A": "x=y", "CSI_B": "\n"}))
	if e.text != "two\nlines" || e.priority != journal.PriErr || !maps.Equal(e.fields, map[string]string{"CSI_A": "x=y", "CSI_B": "\n"}) {
		t.Errorf("%+v", e)
	}
}

// TestSendToJournal: it never waits, and an entry that is too large for a datagram is an error.
func TestSendToJournal(t *testing.T) {
	path := filepath.Join(fake.ShortDir(t), "journal")
	journald, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer journald.Close()
	socket, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(socket)
	entry := []byte("MESSAGE=small\n")
	if err := sendToJournal(socket, path, entry); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 100)
	if n, err := journald.Read(got); err != nil || !bytes.Equal(got[:n], entry) {
		t.Errorf("%q arrived (%v), want %q", got[:n], err, entry)
	}
	if err := sendToJournal(socket, path, bytes.Repeat(entry, 1<<20)); err != unix.EMSGSIZE {
		t.Errorf("%v for a large entry, want EMSGSIZE", err)
	}
	if err := fake.FillDatagrams(path); err != nil {
		t.Fatal(err)
	}
	if err := sendToJournal(socket, path, entry); err != unix.EAGAIN {
		t.Errorf("%v from a journald that does not read, want EAGAIN", err)
	}
}

func TestFieldName(t *testing.T) {
	for key, want := range map[string]string{
		"driver": "CSI_DRIVER", "node-id": "CSI_NODE_ID", "ä": "CSI__",
		strings.Repeat("x", 100): "CSI_" + strings.Repeat("X", 60),
	} {
		if got := fieldName(key); got != want {
			t.Errorf("%s: %s, want %s", key, got, want)
		}
	}
}

func TestUnderJournal(t *testing.T) {
	for _, v := range []string{"", "x", "1:1"} {
		t.Setenv("JOURNAL_STREAM", v)
		if UnderJournal() {
			t.Errorf("JOURNAL_STREAM=%q is believed", v)
		}
	}
}
