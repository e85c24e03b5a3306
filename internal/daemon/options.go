package daemon

import (
	"io"
	"path/filepath"

	"csi-registrar/internal/node/config"
)

// Options are the daemon's command line and environment.
type Options struct {
	Source      config.Source // where the configuration files are
	HTTP        string        // TCP address that serves health and metrics as well; empty: none
	KeepSockets bool          // leave the sockets in the descriptor store when the daemon ends
	Version     string
	Getenv      func(string) string // os.Getenv
	Stderr      io.Writer           // for the log, unless it goes to the journal
}

// runDir is the daemon's directory: control socket, records, last good configuration.
func (o Options) runDir() string { return RunDir(o.Source.Root) }

// RunDir is the daemon's directory below root.
func RunDir(root string) string { return filepath.Join(root, "run", "csi-registrar") }

// stateDir is the directory for what the next process needs, apart from the registrations.
func stateDir(runDir string) string { return filepath.Join(runDir, "state") }

// StoppedFile returns the file with the answer to `cleanup --ask`: whether the unit was stopped for
// good. The answer concerns the daemon that has ended, so the next one removes it before it creates
// a socket.
func StoppedFile(runDir string) string { return filepath.Join(stateDir(runDir), "stopped") }
