package cli

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"csi-registrar/internal/core/control"
	"csi-registrar/internal/node/config"
	"csi-registrar/internal/test/fake"
	"csi-registrar/internal/test/hostile"
	"csi-registrar/internal/tool/doctor"
)

// baitPID is the process that a hostile daemon names.
const baitPID = 424242

// baitUnits is a service manager that records for which units it was asked.
type baitUnits struct{ asked atomic.Pointer[string] }

func (u *baitUnits) Show(_ context.Context, unit string, _ ...string) (map[string]string, error) {
	if unit == hostile.Unit || strings.HasPrefix(unit, "-") {
		u.asked.Store(&unit)
	}
	return map[string]string{"LoadState": "loaded", "ActiveState": "active"}, nil
}

func (*baitUnits) Journal(context.Context, string, ...string) []string { return nil }

// TestHostileDaemon runs the commands of root beside a program that answers at the control socket
// in place of the daemon: they touch no path, query no unit and start no process that it names, and
// write nothing that a terminal would interpret.
func TestHostileDaemon(t *testing.T) {
	dir, root := filepath.Join(fake.ShortDir(t), "bait"), fake.ShortDir(t)
	// Tests of other packages list the directories beside theirs.
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	b, err := hostile.NewBait(dir)
	if err != nil {
		t.Fatal(err)
	}
	untouched := func(what string) {
		t.Helper()
		if err := b.Touched(); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	rootDirFile(t, root, filepath.Join(root, "kubelet"))
	for _, dir := range []string{"kubelet/plugins_registry", "proc", "run/csi-registrar", "run/a", "bin"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	table := fmt.Sprintf("[driver.%q]\nsocket = %q\n", hostile.Driver, filepath.Join(root, "run/a/csi.sock"))
	if err := os.WriteFile(filepath.Join(root, "etc/csi-registrar/config.toml"), fmt.Appendf(nil, "[kubelet]\nroot_dir = %q\n%s", filepath.Join(root, "kubelet"), table), 0o644); err != nil {
		t.Fatal(err)
	}
	programs := filepath.Join(root, "started")
	for _, name := range []string{"systemctl", "journalctl", "ls", "uname", "cat", "df"} {
		script := fmt.Sprintf("#!/bin/sh\necho \"$0 $*\" >>%s\n", programs)
		if err := os.WriteFile(filepath.Join(root, "bin", name), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", filepath.Join(root, "bin"))

	var answer atomic.Pointer[hostile.Answer]
	ln, err := net.Listen("unix", control.Path(root))
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { (*answer.Load())(w) })}
	done := make(chan error, 1)
	go func() { done <- server.Serve(ln) }()
	t.Cleanup(func() {
		server.Close()
		<-done
	})

	answers, err := hostile.Answers(dir, baitPID)
	if err != nil || len(answers) < 60 {
		t.Fatalf("%d answers, %v", len(answers), err)
	}
	for _, name := range slices.Sorted(maps.Keys(answers)) {
		f := answers[name]
		answer.Store(&f)
		for _, args := range [][]string{
			{"status"}, {"status", hostile.Driver}, {"status", "--json"},
			{"wait"}, {"wait", hostile.Driver}, {"reload"}, {"reregister", hostile.Driver}, {"reregister", "--force", hostile.Driver},
		} {
			what := fmt.Sprintf("%s: %v", name, args)
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			if args[0] == "wait" {
				cancel()
				ctx, cancel = context.WithTimeout(t.Context(), 10*time.Millisecond)
			}
			s := newSession()
			s.run(ctx, append(args, "--config-root", root)...)
			cancel()
			checkOutput(t, what, s.stdout.String(), s.stderr.String())
			untouched(what)
		}
		units := &baitUnits{}
		o := doctor.Options{Source: config.Source{Root: root}, Root: root, Units: units}
		r := doctor.Run(t.Context(), o)
		s := newSession()
		if err := writeJSON(s.stdout, r, "  "); err != nil {
			t.Fatal(err)
		}
		checkOutput(t, name+": doctor", doctorText(r, s.env.page(), false), s.stdout.String())
		for _, f := range r.Findings {
			for _, line := range f.Fix {
				if hostile.Names(line.String(), filepath.Base(dir)) != "" {
					t.Errorf("%s: doctor prints %s", name, line)
				}
			}
		}
		untouched(name + ": doctor")
		if unit := units.asked.Load(); unit != nil {
			t.Errorf("%s: doctor asks systemd for %s", name, *unit)
		}
		if strings.HasPrefix(name, "everything") || strings.HasPrefix(name, "no JSON") {
			checkArchive(t, root, name)
			untouched(name + ": bugreport")
		}
	}
	started, err := os.ReadFile(programs)
	if err != nil || !strings.Contains(string(started), "/journalctl ") {
		t.Fatalf("no program was started: %v", err)
	}
	if named := hostile.Names(string(started), dir); named != "" {
		t.Errorf("a program was started with %s", named)
	}
}

// checkArchive writes a bug report and checks that its files can be shown on a terminal.
func checkArchive(t *testing.T, root, what string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "archive.tar.gz")
	if code, _, errs := try(t, "bugreport", "--output", file, "--config-root", root); code != 0 {
		t.Fatalf("%s: bugreport: %s", what, errs)
	}
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	z, err := gzip.NewReader(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if err == io.EOF {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		harmless(t, what+": "+h.Name, strings.ReplaceAll(string(text), "\t", " "), false)
	}
}
