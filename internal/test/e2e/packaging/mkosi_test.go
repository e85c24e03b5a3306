package packaging

import (
	"errors"
	"fmt"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"csi-registrar/internal/test/e2e/built"
	"csi-registrar/internal/test/e2e/system/nspawn"
)

// TestMkosi builds the image of packaging/examples/mkosi, adds a kubelet, and boots it. No command
// is run in it before the kubelet has registered the driver. The driver's package comes from the
// signed repository, which has the older version of both packages, the daemon's from a directory.
func TestMkosi(t *testing.T) {
	t.Parallel()
	p := newPublished(t)
	dir := t.TempDir()
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	cache = filepath.Join(cache, "csi-registrar", "mkosi")
	bin := tools(t, []string{dir, cache}, "mkosi")
	h := &host{}
	h.dir.Store(p.older)
	h.change.Store(unchanged)
	server := httptest.NewServer(h)
	defer server.Close()
	build := exec.Command("sh", "-euc", `
		mkdir -p "$cache"
		cp -r packaging/examples/mkosi "$dir/definition"
		cd "$dir/definition"
		dpkg-deb -x "$repository/csi-registrar-archive-keyring.deb" mkosi.sandbox
		sed -i "s|http://$address|$url|" mkosi.sandbox/etc/apt/sources.list.d/csi-registrar.sources
		mkdir mkosi.packages
		cp "$packages"/csi-registrar_"$version"_*.deb mkosi.packages
		mkdir -p mkosi.extra/usr/bin mkosi.extra/usr/lib/systemd/system/multi-user.target.wants
		cp "$packages/kubelet" mkosi.extra/usr/bin/test-kubelet
		cat >mkosi.extra/usr/lib/systemd/system/kubelet.service <<-END
			[Service]
			ExecStart=/usr/bin/test-kubelet --root /var/lib/kubelet --handler record
			StandardOutput=append:/run/events
			StandardError=null
			END
		ln -s ../kubelet.service mkosi.extra/usr/lib/systemd/system/multi-user.target.wants/
		# Instead of the mirrors that mkosi would use: the one of this machine.
		cat >mkosi.sandbox/etc/apt/sources.list.d/mkosi.sources <<-END
			Types: deb
			URIs: $mirror
			Suites: trixie
			Components: main
			Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
			END
		mkdir "$dir/work" "$dir/out"
		mkosi --directory="$dir/definition" --output-dir="$dir/out" --workspace-directory="$dir/work" \
			--package-cache-dir="$cache" --split-artifacts=partitions build`)
	build.Dir = built.Root(t)
	mirror, err := exec.Command(filepath.Join(built.Root(t), "scripts", "debian-mirror")).Output()
	if err != nil {
		t.Fatalf("scripts/debian-mirror: %v", err)
	}
	build.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"), "dir="+dir, "cache="+cache, "packages="+filepath.Dir(p.older), "repository="+p.older,
		"version="+newer, "address="+address, "url="+server.URL, "mirror="+strings.TrimSpace(string(mirror)))
	start := time.Now()
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("mkosi: %v\n%s", err, out)
	}
	t.Logf("built in %s", time.Since(start))

	for name, c := range map[string]struct {
		boots  int
		change func(m *nspawn.Machine) // of the machine while it is off
	}{
		"as it is": {2, func(*nspawn.Machine) {}},
		"an empty etc": {2, func(m *nspawn.Machine) {
			if err := errors.Join(os.RemoveAll(m.Path("/etc")), os.Mkdir(m.Path("/etc"), 0o755)); err != nil {
				t.Fatal(err)
			}
		}},
		"nothing but usr": {1, func(m *nspawn.Machine) { m.Args = append(m.Args, "--volatile=yes") }},
	} {
		t.Run(name, func(t *testing.T) {
			m := nspawn.NewFromImage(t, "image", only(t, dir+"/out/*.root-*.raw"), only(t, dir+"/out/*.usr-*.raw"))
			c.change(m)
			id := ""
			for boot := range c.boots {
				m.SwitchOn()
				m.Eventually(2*time.Minute, "a registration", func() error {
					if r, d := count(m.Read("/run/events")); r != 1 || d != 0 {
						return fmt.Errorf("the kubelet saw %d and %d ends of one", r, d)
					}
					return nil
				})
				if err := os.WriteFile(m.Path("/usr/x"), nil, 0o644); !errors.Is(err, syscall.EROFS) {
					t.Errorf("writing to /usr: %v, want %v", err, syscall.EROFS)
				}
				if now := m.Read("/etc/machine-id"); boot > 0 && now != id || len(now) < 32 {
					t.Errorf("boot %d is that of machine %q, the one before was of %q", boot, now, id)
				}
				id = m.Read("/etc/machine-id")
				m.Run("systemctl", "is-system-running", "--wait") // no unit has failed
				for command, version := range map[string]string{"csi-registrar version": newer, "csi-sample-driver --version": older} {
					if out := m.Run(strings.Fields(command)...); !strings.Contains(out, version) {
						t.Errorf("%s: %q, want %s", command, out, version)
					}
				}
				m.Poweroff()
			}
		})
	}
}
