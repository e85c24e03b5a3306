package daemon

import (
	"io"
	"testing"

	"csi-registrar/internal/node/config"
)

// BenchmarkLogLine is a line of the daemon's log with what a registrar says in it.
func BenchmarkLogLine(b *testing.B) {
	logger := newLogger(io.Discard, config.Log{Level: "info", Format: "text"})
	defer logger.queue.Close()
	log := logger.Logger
	log = log.With("driver", "nfs.csi.k8s.io")
	b.ReportAllocs()
	for b.Loop() {
		log.Info("registered", "MESSAGE_ID", messageReady, "state", "registered", "from", "published", "reason", "")
	}
}
