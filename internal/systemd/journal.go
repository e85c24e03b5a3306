package systemd

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"

	"github.com/coreos/go-systemd/v22/journal"
)

// identifier is what `journalctl -t` selects by.
const identifier = "csi-registrar"

// MessageID is the key of the attribute whose value says what kind of entry it is: the
// 128-bit number, 32 hexadecimal digits, under which the message catalogue explains it.
const MessageID = "MESSAGE_ID"

// UnderJournal reports whether standard error is a stream of the journal, so that speaking
// to it natively instead says more to the same place (systemd's "automatic protocol
// upgrading", $JOURNAL_STREAM).
func UnderJournal() bool {
	is, err := journal.StderrIsJournalStream()
	return err == nil && is // a variable that makes no sense is not systemd's
}

// NewJournalHandler returns a handler that writes entries of that level and above to the
// journal: the message with its attributes as text, and each attribute as a field of its
// own, CSI_ and the key in capitals (CSI_DRIVER=). An attribute MESSAGE_ID keeps its name
// and does not show in the text. What the journal does not take goes to standard error.
func NewJournalHandler(level slog.Leveler) (slog.Handler, error) {
	if !journal.Enabled() {
		return nil, fmt.Errorf("cannot reach the journal at its socket below /run/systemd/journal")
	}
	return &journalHandler{
		level:    level,
		send:     journal.Send,
		fallback: slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}),
	}, nil
}

type journalHandler struct {
	level    slog.Leveler
	send     func(text string, priority journal.Priority, fields map[string]string) error
	fallback slog.Handler
	groups   []string
	attrs    []attr
}

type attr struct{ key, value string }

func (h *journalHandler) Enabled(_ context.Context, level slog.Level) bool {
	return level >= h.level.Level()
}

func (h *journalHandler) Handle(ctx context.Context, record slog.Record) error {
	attrs := slices.Clip(h.attrs)
	record.Attrs(func(a slog.Attr) bool {
		attrs = flatten(attrs, h.groups, a)
		return true
	})
	fields := map[string]string{"SYSLOG_IDENTIFIER": identifier}
	text := strings.Builder{}
	text.WriteString(record.Message)
	for _, a := range attrs {
		if a.key == MessageID {
			fields[MessageID] = a.value
			continue
		}
		fields[fieldName(a.key)] = a.value
		fmt.Fprintf(&text, " %s=%s", a.key, quoted(a.value))
	}
	if err := h.send(text.String(), priority(record.Level), fields); err != nil {
		record.AddAttrs(slog.String("journal_error", err.Error()))
		return h.fallback.Handle(ctx, record)
	}
	return nil
}

func (h *journalHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	with := *h
	with.attrs = slices.Clip(h.attrs)
	for _, a := range attrs {
		with.attrs = flatten(with.attrs, h.groups, a)
	}
	with.fallback = h.fallback.WithAttrs(attrs)
	return &with
}

func (h *journalHandler) WithGroup(name string) slog.Handler {
	if name == "" {
		return h
	}
	with := *h
	with.groups = append(slices.Clip(h.groups), name)
	with.fallback = h.fallback.WithGroup(name)
	return &with
}

// flatten appends an attribute as text, a group as one for each of its members.
func flatten(to []attr, groups []string, a slog.Attr) []attr {
	value := a.Value.Resolve()
	if value.Kind() == slog.KindGroup {
		if a.Key != "" {
			groups = append(slices.Clip(groups), a.Key)
		}
		for _, member := range value.Group() {
			to = flatten(to, groups, member)
		}
		return to
	}
	if a.Key == "" {
		return to
	}
	return append(to, attr{strings.Join(append(slices.Clip(groups), a.Key), "."), value.String()})
}

// fieldName makes a field's name of a key. The journal takes capitals, digits and _, at
// most 64.
func fieldName(key string) string {
	name := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z':
			return r - 'a' + 'A'
		case r >= 'A' && r <= 'Z', r >= '0' && r <= '9':
			return r
		}
		return '_'
	}, "CSI_"+key)
	return name[:min(len(name), 64)]
}

// quoted puts a value in quotes where it would not be read as one word.
func quoted(value string) string {
	if value == "" || strings.ContainsFunc(value, func(r rune) bool { return r <= ' ' || r == '"' || r == '=' || r == 0x7f }) {
		return fmt.Sprintf("%q", value)
	}
	return value
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
