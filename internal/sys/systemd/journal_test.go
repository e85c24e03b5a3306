package systemd

import (
	"bytes"
	"errors"
	"log/slog"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/coreos/go-systemd/v22/journal"
)

type entry struct {
	text     string
	priority journal.Priority
	fields   map[string]string
}

func fakeJournal(fallback *bytes.Buffer, fail error) (*[]entry, *journalHandler) {
	var got []entry
	return &got, &journalHandler{
		level: slog.LevelInfo,
		send: func(text string, p journal.Priority, fields map[string]string) error {
			if fail == nil {
				got = append(got, entry{text, p, fields})
			}
			return fail
		},
		fallback: slog.NewTextHandler(fallback, nil),
	}
}

func TestJournalHandler(t *testing.T) {
	got, h := fakeJournal(nil, nil)
	log := slog.New(h).With("driver", "nfs.csi.k8s.io")
	log.Info("registered", "MESSAGE_ID", "0123456789abcdef0123456789abcdef", "took", 120*time.Millisecond)
	log.Debug("too low")
	log.WithGroup("kubelet").Warn("refused", "error", `no "x" here`, slog.Group("at", "Node-Id", 7), slog.Group("", "flat", ""))
	log.Error("broken", "a b", "c")
	log.With("state", "x").WithGroup("").Log(t.Context(), slog.LevelError+4, "worse")
	want := []entry{
		{"registered driver=nfs.csi.k8s.io took=120ms", journal.PriInfo,
			map[string]string{"MESSAGE_ID": "0123456789abcdef0123456789abcdef", "CSI_DRIVER": "nfs.csi.k8s.io", "CSI_TOOK": "120ms"}},
		{`refused driver=nfs.csi.k8s.io kubelet.error="no \"x\" here" kubelet.at.Node-Id=7 kubelet.flat=""`, journal.PriWarning,
			map[string]string{"CSI_DRIVER": "nfs.csi.k8s.io", "CSI_KUBELET_ERROR": `no "x" here`, "CSI_KUBELET_AT_NODE_ID": "7", "CSI_KUBELET_FLAT": ""}},
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
	got, h := fakeJournal(nil, nil)
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
	_, h := fakeJournal(&out, errors.New("no journal"))
	slog.New(h).With("driver", "d").WithGroup("g").Info("registered", "k", "v")
	for _, part := range []string{"registered", "driver=d", "g.k=v", `journal_error="no journal"`} {
		if !strings.Contains(out.String(), part) {
			t.Errorf("%q lacks %q", out.String(), part)
		}
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
