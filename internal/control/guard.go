package control

import (
	"log/slog"
	"net"
	"os"
	"syscall"

	"csi-registrar/internal/unixsock"
)

// guarded accepts connections of root and of the daemon's own user, and closes others.
type guarded struct {
	net.Listener
	log *slog.Logger
}

func (g guarded) Accept() (net.Conn, error) {
	for {
		c, err := g.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if g.welcome(c) {
			return c, nil
		}
		if err := c.Close(); err != nil {
			g.log.Debug("closing a refused connection to the control socket", "error", err)
		}
	}
}

func (g guarded) welcome(c net.Conn) bool {
	sc, ok := c.(syscall.Conn)
	if !ok {
		g.log.Warn("refused a connection to the control socket: it is not a Unix socket")
		return false
	}
	cred, err := unixsock.PeerCred(sc)
	if err != nil {
		g.log.Warn("refused a connection to the control socket", "error", err)
		return false
	}
	if cred.UID != 0 && int64(cred.UID) != int64(os.Geteuid()) {
		g.log.Warn("refused a connection to the control socket: only root may use it", "peer", cred.String())
		return false
	}
	return true
}
