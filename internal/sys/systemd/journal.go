package systemd

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/journal"
	"golang.org/x/sys/unix"

	"csi-registrar/internal/sys/logqueue"
	"csi-registrar/internal/sys/rate"
	"csi-registrar/internal/sys/unixsock"
)

// journalSocket is where journald receives entries in its native protocol.
const journalSocket = "/run/systemd/journal/socket"

// MessageID is the key of the attribute that identifies the kind of entry: a 128-bit number in 32
// hexadecimal digits, under which the message catalog explains it.
const MessageID = "MESSAGE_ID"

// UnderJournal reports whether standard error is connected to the journal, so that the native
// protocol can be used instead (systemd's "automatic protocol upgrading", $JOURNAL_STREAM).
func UnderJournal() bool {
	ok, err := journal.StderrIsJournalStream()
	return err == nil && ok // systemd did not set an invalid variable
}

// JournalOptions configure NewJournalHandler.
type JournalOptions struct {
	Level   slog.Leveler
	Sink    logqueue.Sink // what writes the entries, and waits while journald does not read them
	Stderr  io.Writer     // for what journald does not accept
	Refused func()        // called when nobody listens at journald's socket
}

// NewJournalHandler returns a handler that writes entries to the journal: the message with its
// attributes as text, and each attribute as a separate field, CSI_ and the key in capitals
// (CSI_DRIVER=). An attribute MESSAGE_ID keeps its name and is not in the text.
func NewJournalHandler(o JournalOptions) (slog.Handler, error) {
	if _, err := os.Stat(journalSocket); err != nil {
		return nil, fmt.Errorf("cannot reach the journal: %w", err)
	}
	socket, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("cannot open a socket for the journal: %w", err)
	}
	return &journalHandler{JournalOptions: o, send: func(entry []byte) error { return sendToJournal(socket, journalSocket, entry) }}, nil
}

type journalHandler struct {
	JournalOptions
	send  func(entry []byte) error // it does not wait
	attrs []slog.Attr
}

func (h *journalHandler) Enabled(_ context.Context, level slog.Level) bool {
	return level >= h.Level.Level()
}

// Handle uses a TextHandler to format the attributes, and collects the fields in its ReplaceAttr.
func (h *journalHandler) Handle(ctx context.Context, record slog.Record) error {
	// journalctl -t selects the identifier.
	fields := map[string]string{"SYSLOG_IDENTIFIER": "csi-registrar"}
	builtin := 0 // how many of the next attributes are built in: the level and the message
	collect := func(_ []string, a slog.Attr) slog.Attr {
		switch {
		case builtin > 0:
			builtin--
			return slog.Attr{}
		case a.Key == MessageID:
			fields[MessageID] = a.Value.String()
			return slog.Attr{}
		}
		fields[fieldName(a.Key)] = a.Value.String()
		return a
	}
	var text strings.Builder
	handler := slog.NewTextHandler(&text, &slog.HandlerOptions{ReplaceAttr: collect}).WithAttrs(h.attrs)
	builtin = 2
	attrs := record.Clone()
	attrs.Time = time.Time{} // it would be the third built-in attribute
	if err := handler.Handle(ctx, attrs); err != nil {
		return err
	}
	message := strings.TrimSpace(record.Message + " " + text.String())
	h.Sink(func(ctx context.Context) { h.write(ctx, record, message, fields) })
	return nil
}

// write sends an entry, as soon as there is room for it.
func (h *journalHandler) write(ctx context.Context, record slog.Record, message string, fields map[string]string) {
	level := priority(record.Level)
	for ok := true; ok; ok = rate.Pause(ctx, sendPause) {
		// journald has the time of receipt
		if late := time.Since(record.Time).Round(time.Second); late > time.Second {
			fields["CSI_DELAYED"] = late.String()
		}
		err := h.send(encode(level, message, fields))
		switch {
		case err == nil:
			return
		case !errors.Is(err, unix.EAGAIN):
			if errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.ENOENT) {
				h.Refused()
			}
			// Standard error is connected to journald, too, which parses the level, and splits
			// what does not fit into a datagram (200 kB).
			_, _ = fmt.Fprintf(h.Stderr, "<%d>%s journal_error=%q\n", level, message, err)
			return
		}
	}
}

// encode returns an entry in journald's native protocol (systemd.io/JOURNAL_NATIVE_PROTOCOL).
func encode(level journal.Priority, message string, fields map[string]string) []byte {
	var b bytes.Buffer
	field := func(name, value string) {
		if !strings.Contains(value, "\n") {
			fmt.Fprintf(&b, "%s=%s\n", name, value)
			return
		}
		fmt.Fprintln(&b, name)
		b.Write(binary.LittleEndian.AppendUint64(nil, uint64(len(value))))
		fmt.Fprintln(&b, value)
	}
	field("PRIORITY", strconv.Itoa(int(level)))
	field("MESSAGE", message)
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		field(name, fields[name])
	}
	return b.Bytes()
}

// sendToJournal sends an entry from an unconnected socket, without waiting. go-systemd's
// journal.Send waits without a limit, and for ever if only entries of others fill journald's queue:
// nothing wakes it when there is room again.
func sendToJournal(socket int, path string, entry []byte) error {
	return unix.Sendmsg(socket, entry, nil, &unix.SockaddrUnix{Name: path}, unix.MSG_NOSIGNAL)
}

// RemovedJournal returns the socket at which this process reaches journald if it is a bind mount of
// one that was removed, otherwise zero: after a restart of systemd-journald.socket nobody listens
// there, and only a new mount namespace has the next one.
func RemovedJournal() unixsock.FileID {
	var st unix.Stat_t
	if err := unix.Stat(journalSocket, &st); err != nil || st.Nlink > 0 {
		return unixsock.FileID{}
	}
	file, _ := unixsock.Stat(journalSocket) // zero after an error
	return file.FileID
}

func (h *journalHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	derived := *h
	derived.attrs = slices.Concat(h.attrs, attrs)
	return &derived
}

// WithGroup ignores the group: no entry of this program has one.
func (h *journalHandler) WithGroup(string) slog.Handler { return h }

// fieldName returns the name of a field for a key: capitals, digits and _, at most 64 characters.
func fieldName(key string) string {
	name := strings.Map(func(r rune) rune {
		if r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' {
			return r
		}
		return '_'
	}, "CSI_"+strings.ToUpper(key))
	return name[:min(len(name), 64)]
}

func priority(level slog.Level) journal.Priority {
	switch {
	case level >= slog.LevelError:
		return journal.PriErr
	case level >= slog.LevelWarn:
		return journal.PriWarning
	case level >= slog.LevelInfo:
		return journal.PriInfo
	}
	return journal.PriDebug
}
