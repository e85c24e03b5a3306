package config

import (
	"os"
	"path/filepath"
	"testing"
)

// shown has a table from two files, one of defaults, and one with an error.
func shownSource(t *testing.T) Source {
	return tree(t, map[string]string{
		inLib + "conf.d/20-nfs.toml": "[driver.\"nfs.csi.k8s.io\"]\nsocket = \"/run/nfs/csi.sock\"\nsocket_owner = \"any\"\n",
		inEtc + "conf.d/60-nfs.toml": "[driver.\"nfs.csi.k8s.io\"]\ntimeout = \"90s\"\nsupported_versions = [\"1.0.0\", \"1.1.0\"]\n[log]\nlevel = \"debug\"\n",
		inEtc + "conf.d/30-off.toml": "",
		inLib + "conf.d/30-off.toml": "[driver.off]\nsocket = \"/run/off.sock\"\n",
		inEtc + "conf.d/70-bad.toml": "[driver.bad]\nsocket = \"/run/bad.sock\"\nenabled = 0\n",
	})
}

func TestShow(t *testing.T) {
	s := shownSource(t)
	r := Load(s)
	shown := r.Show()
	const want = `# From these files, in order:
#   /usr/lib/csi-registrar/conf.d/20-nfs.toml
#   /etc/csi-registrar/conf.d/60-nfs.toml
#   /etc/csi-registrar/conf.d/70-bad.toml
# Hidden: /usr/lib/csi-registrar/conf.d/30-off.toml, by /etc/csi-registrar/conf.d/30-off.toml
# Left out for an error: driver."bad"

[kubelet]
root_dir = "/var/lib/kubelet"  # default

[log]
level  = "debug"  # from /etc/csi-registrar/conf.d/60-nfs.toml:5
format = "auto"   # default

[driver."nfs.csi.k8s.io"]
socket              = "/run/nfs/csi.sock"  # from /usr/lib/csi-registrar/conf.d/20-nfs.toml:2
endpoint            = "/run/nfs/csi.sock"  # default
enabled             = true                 # default
timeout             = "1m30s"              # from /etc/csi-registrar/conf.d/60-nfs.toml:2
supported_versions  = ["1.0.0", "1.1.0"]   # from /etc/csi-registrar/conf.d/60-nfs.toml:3
when_driver_is_gone = "keep"               # default
withdraw_after      = "30s"                # default
probe_every         = "1m0s"               # default
when_limit_changes  = "republish"          # default
socket_owner        = "any"                # from /usr/lib/csi-registrar/conf.d/20-nfs.toml:3
`
	if got := s.below(shown); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if again := one(shown); !again.Config.Equal(r.Config) || again.Errors != nil {
		t.Errorf("read again: %+v %v", again.Config, again.Errors)
	}

	if got, want := Load(Source{Root: t.TempDir()}).Show(), `# No configuration file: these are the defaults.

[kubelet]
root_dir = "/var/lib/kubelet"  # default

[log]
level  = "info"  # default
format = "auto"  # default
`; got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

// TestShowHostileName: a file name cannot break out of its comment.
func TestShowHostileName(t *testing.T) {
	file := filepath.Join(t.TempDir(), "x\n[driver.evil]\n#")
	if err := os.WriteFile(file, []byte("[log]\nlevel = \"warn\"\n"), 0o600); err == nil {
		r := Load(Source{File: file})
		if again := one(r.Show()); !again.Config.Equal(r.Config) || again.Errors != nil {
			t.Errorf("%s\n%v", r.Show(), again.Errors)
		}
	}
}
