package agent

import (
	"slices"

	"csi-registrar/internal/config"
)

// leftover is a registration socket that is to go and could not be taken away.
type leftover struct {
	name    string
	kubelet config.Kubelet
	socket  Socket
}

// socket is a driver's new registration socket, or the one that it still has.
func (a *Agent) socket(name string) (Socket, error) {
	for i, l := range a.left {
		if l.name == name && l.kubelet == a.config.Kubelet {
			a.left = slices.Delete(a.left, i, i+1)
			return l.socket, nil
		}
	}
	return a.parts.Socket(a.config, name)
}

// withdrawLeft tries again to take away what could not be.
func (a *Agent) withdrawLeft() {
	a.left = slices.DeleteFunc(a.left, func(l leftover) bool {
		if err := l.socket.Withdraw(a.ctx); err != nil {
			a.log.Debug("cannot take a registration socket away yet", "driver", l.name, "error", err)
			return false
		}
		a.log.Info("withdrawn at last", "driver", l.name)
		if _, err := l.socket.Close(a.ctx); err != nil {
			a.log.Error("cannot end a registration cleanly", "driver", l.name, "error", err)
		}
		return true
	})
}
