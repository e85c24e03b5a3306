package main

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"strconv"

	"csi-registrar/internal/test/hostile"
)

// chosen has the name of the next answer.
const chosen = "/run/csi-registrar/state/answer"

// answer serves the control socket, which systemd passed.
func answer(dir, process string) error {
	pid, err := strconv.Atoi(process)
	if err != nil {
		return err
	}
	answers, err := hostile.Answers(dir, pid)
	if err != nil {
		return err
	}
	ln, err := net.FileListener(os.NewFile(3, "control"))
	if err != nil {
		return fmt.Errorf("cannot serve the control socket: %w", err)
	}
	return http.Serve(ln, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		name, err := os.ReadFile(chosen)
		if answer := answers[string(name)]; err == nil && answer != nil {
			answer(w)
			return
		}
		http.Error(w, fmt.Sprintf("no answer was chosen: %v", err), http.StatusTeapot)
	}))
}
