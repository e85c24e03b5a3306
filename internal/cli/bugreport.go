package cli

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"csi-registrar/internal/tool/bugreport"
	"csi-registrar/internal/node/config"
	"csi-registrar/internal/core/control"
	"csi-registrar/internal/node/distro"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/systemd"
)

func setupBugreport(fs *flag.FlagSet) runner {
	output := fs.String("output", "", "write `FILE`, which must not exist; default: a new file in the current directory")
	redact := fs.Bool("redact", false, "replace host names, node ids and IP addresses by placeholders")
	root := rootFlag(fs)
	return func(ctx context.Context, e *env, _ []string) error {
		dir := "csi-registrar-bugreport-" + e.now().UTC().Format("20060102T150405Z")
		path, host := cmp.Or(*output, dir+".tar.gz"), ""
		if *redact {
			var err error
			if host, err = os.Hostname(); err != nil {
				return fmt.Errorf("cannot replace the host name: %w", err)
			}
		}
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return fmt.Errorf("cannot write the archive: %w", err)
		}
		err = bugreport.Write(ctx, f, dir, e.now(), bugreportParts(e, *root), host)
		if err = errors.Join(err, f.Close()); err != nil {
			return fmt.Errorf("cannot write the archive: %w", errors.Join(err, os.Remove(path)))
		}
		_, err = fmt.Fprintln(e.stdout, path)
		return err
	}
}

// bugreportParts returns the entries of the archive.
func bugreportParts(e *env, root string) []bugreport.Part {
	ours := []string{"csi-registrar.service", "csi-registrar.socket", "csi-registrar-http.socket", "csi-registrar-sweep.service"}
	// The newest lines of the last day, each with its time.
	journal := func(args ...string) func(context.Context, io.Writer) error {
		return bugreport.Command("journalctl", append([]string{"--no-pager", "--quiet", "--output=short-iso-precise", "--since=-24h", "--lines=20000"}, args...)...)
	}
	kubelet := []string{"--grep=plugin|csi"}
	for _, unit := range distro.Units() {
		kubelet = append(kubelet, "--unit="+unit)
	}
	return []bugreport.Part{
		{Name: "version.json", Plain: true, Write: ownCommand(e, "version", "--json")},
		{Name: "status.json", Write: ownCommand(e, "status", "--json", "--config-root", root)},
		{Name: "doctor.json", Write: ownCommand(e, "doctor", "--json", "--config-root", root)},
		{Name: "config.txt", Write: ownCommand(e, "config", "show", "--config-root", root)},
		{Name: "metrics.txt", Write: func(ctx context.Context, w io.Writer) error {
			text, err := control.NewClient(control.Path(root)).Metrics(ctx)
			_, writeErr := w.Write(text)
			return errors.Join(err, writeErr)
		}},
		{Name: "units.txt", Write: bugreport.Command("systemctl", append([]string{"cat", "--no-pager", "--"}, ours...)...)},
		{Name: "properties.txt", Write: bugreport.Command("systemctl", append([]string{"show", "--no-pager", "--"}, ours...)...)},
		{Name: "journal.txt", Write: journal("--unit=csi-registrar*")},
		{Name: "kubelet.txt", NewestFirst: true, Write: journal(kubelet...)},
		{Name: "drivers.txt", Write: func(ctx context.Context, w io.Writer) error { return writeDrivers(ctx, w, root) }},
		{Name: "system.txt", Write: func(ctx context.Context, w io.Writer) error { return writeSystem(ctx, w, root) }},
		{Name: "files.txt", Write: func(ctx context.Context, w io.Writer) error {
			return bugreport.Command("ls", append([]string{"-labn", "--time-style=full-iso", "--"}, reportedDirs(root)...)...)(ctx, w)
		}},
	}
}

// maxDriverLines is how many lines of the journal of each driver's unit are collected.
const maxDriverLines = 200

// writeDrivers writes the units that run the drivers, and their last log entries in chronological
// order.
func writeDrivers(ctx context.Context, w io.Writer, root string) error {
	s, err := control.NewClient(control.Path(root)).Status(ctx)
	if err != nil {
		return err
	}
	var units []string
	for _, d := range s.Drivers {
		fmt.Fprintf(w, "%s: unit %s, pod %s, container %s\n", safetext.Word(d.Name),
			safetext.Word(d.Server.Unit), safetext.Word(d.Server.Pod), safetext.Word(d.Server.Container))
		if safetext.UnitName(d.Server.Unit) && !slices.Contains(units, d.Server.Unit) {
			units = append(units, d.Server.Unit)
		}
	}
	if len(units) == 0 {
		return nil
	}
	lines := []string{"--no-pager", "--quiet", "--output=short-iso-precise", fmt.Sprintf("--lines=%d", maxDriverLines*len(units))}
	for _, unit := range units {
		lines = append(lines, "--unit="+unit)
	}
	return errors.Join(bugreport.Command("systemctl", append([]string{"cat", "--no-pager", "--"}, units...)...)(ctx, w),
		bugreport.Command("journalctl", lines...)(ctx, w))
}

// writeSystem writes the versions of the node's components, and the mounts and the free space of
// root_dir. A command that fails does not prevent the others.
func writeSystem(ctx context.Context, w io.Writer, root string) error {
	kubelet := config.Load(config.Source{Root: root}).Config.Kubelet.RootDir
	var errs []error
	for _, c := range [][]string{
		{"uname", "-a"}, {"cat", "/etc/os-release"}, {"systemctl", "--version"},
		{"kubelet", "--version"}, {"k3s", "--version"}, {"rke2", "--version"}, {"k0s", "version"},
		{"containerd", "--version"}, {"crio", "--version"}, {"podman", "--version"}, {"crictl", "version"},
		{"df", "-h", kubelet, "/run"}, {"df", "-i", kubelet, "/run"},
	} {
		if _, err := exec.LookPath(c[0]); err != nil {
			continue // a node has only some of them
		}
		fmt.Fprintf(w, "\n$ %s\n", safetext.Run(c[0], c[1:]...))
		errs = append(errs, bugreport.Command(c[0], c[1:]...)(ctx, w))
	}
	return errors.Join(append(errs, writeMounts(w, kubelet))...)
}

// writeMounts writes the mounts below a directory, and those that contain it.
func writeMounts(w io.Writer, dir string) error {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "\nmounts of %s\n", safetext.Word(dir))
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if len(fields) > 4 && (systemd.Within(fields[4], dir) || systemd.Within(dir, fields[4])) {
			fmt.Fprint(w, line)
		}
	}
	return nil
}

// ownCommand writes the output of one of our commands. A problem that it reports is not a failure.
func ownCommand(e *env, args ...string) func(context.Context, io.Writer) error {
	return func(ctx context.Context, w io.Writer) error {
		own := *e
		own.stdout, own.stderr = w, w
		err := dispatch(ctx, &own, commands(), args)
		if x, ok := errors.AsType[*exitError](err); ok && x.err == nil {
			return nil
		}
		return err
	}
}

// reportedDirs returns the directories to list.
func reportedDirs(root string) (dirs []string) {
	source := config.Source{Root: root}
	kubelet := config.Load(source).Config.Kubelet.RootDir
	run := filepath.Dir(control.Path(root))
	return append(source.Watch(), run, filepath.Join(run, "registrations"), rootdir.PluginsRegistry(kubelet), filepath.Join(kubelet, "plugins"))
}
