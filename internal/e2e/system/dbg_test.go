package system

import "testing"

func TestDbg(t *testing.T) {
	onEach(t, func(t *testing.T, suite string) {
		for _, c := range []string{
			"systemctl restart csi-registrar-http.socket csi-registrar.service",
			"systemctl restart csi-registrar.service",
			"systemctl restart csi-registrar.service csi-registrar-http.socket",
			"systemctl restart csi-registrar.socket",
			"systemctl restart csi-registrar.socket csi-registrar-http.socket csi-registrar.service",
		} {
			n := registeredNode(t, suite)
			mark := n.mark()
			n.Run("systemctl", "enable", "csi-registrar-http.socket")
			for i := range 3 {
				out, err := n.Try("sh", "-c", c)
				n.waited()
				out2, _ := n.Try("systemctl", "is-active", "csi-registrar-http.socket")
				_, err3 := n.get("/healthz")
				t.Log(c, i, out, err, out2, err3, n.events()[mark:])
			}
		}
	})
}
