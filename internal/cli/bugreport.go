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
	"time"

	"csi-registrar/internal/core/control"
	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/distro"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/node/volumes"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/worker"
	"csi-registrar/internal/tool/bugreport"
	"csi-registrar/internal/tool/doctor"
)

func setupBugreport(fs *flag.FlagSet) runner {
	output := fs.String("output", "", "write `FILE`, which must not exist; default: a new file in the current directory")
	root := rootFlag(fs)
	return func(ctx context.Context, e *env, _ []string) error {
		dir := "csi-registrar-bugreport-" + e.now().UTC().Format("20060102T150405Z")
		path := cmp.Or(*output, dir+".tar.gz")
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return fmt.Errorf("cannot write the archive: %w", err)
		}
		err = bugreport.Write(ctx, f, dir, e.now(), bugreportParts(e, *root))
		if err = errors.Join(err, f.Close()); err != nil {
			return fmt.Errorf("cannot write the archive: %w", errors.Join(err, os.Remove(path)))
		}
		_, err = fmt.Fprintln(e.stdout, path)
		return err
	}
}

// aboutCSI matches the kubelet's lines about CSI, without those of its usual verbosity (2) about
// volumes of other kinds and its plugins.
const aboutCSI = `^(?!.*\bi[0-9]{4} .*(loaded volume plugin|verifycontrollerattachedvolume|kubernetes\.io/(?!csi))).*(plugin|csi)`

// bugreportParts returns the entries of the archive.
func bugreportParts(e *env, root string) []bugreport.Part {
	ours := []string{"csi-registrar.service", "csi-registrar.socket", "csi-registrar-http.socket", "csi-registrar-sweep.service"}
	// The newest lines of the last day, each with its time.
	journal := func(args ...string) func(context.Context, io.Writer) error {
		return bugreport.Command("journalctl", append([]string{"--no-pager", "--quiet", "--output=short-iso-precise", "--since=-24h", "--lines=20000"}, args...)...)
	}
	kubelet := []string{"--grep=" + aboutCSI} // the newest first
	for _, unit := range distro.Units {
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
		{Name: "kubelet.txt", Write: journal(kubelet...)},
		{Name: "drivers.txt", Write: func(ctx context.Context, w io.Writer) error { return writeDrivers(ctx, w, root) }},
		{Name: "system.txt", Write: func(ctx context.Context, w io.Writer) error { return writeSystem(ctx, w, root) }},
		{Name: "files.txt", Write: func(ctx context.Context, w io.Writer) error { return writeFiles(ctx, w, root) }},
	}
}

// maxDriverLines is how many lines of the journal of each driver's unit are collected.
const maxDriverLines = 200

// writeDrivers writes the units that run the drivers, and their last log entries in chronological
// order.
func writeDrivers(ctx context.Context, w io.Writer, root string) error {
	var units []string
	for _, d := range doctor.Servers(ctx, config.Source{Root: root}) {
		fmt.Fprintf(w, "%s: unit %s, pod %s\n", d.Driver, cmp.Or(d.Unit, "-"), cmp.Or(d.Pod, "-"))
		if d.Unit != "" && !slices.Contains(units, d.Unit) {
			units = append(units, d.Unit)
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

// writeSystem writes the versions of the node's components, the free space of root_dir, and the
// mounts. A command that fails does not prevent the others.
func writeSystem(ctx context.Context, w io.Writer, root string) error {
	res, err := loadConfig(ctx, config.Source{Root: root})
	if err != nil {
		return err
	}
	kubelet := res.Config.Kubelet.RootDir
	var errs []error
	for _, c := range [][]string{
		{"uname", "-a"}, {"cat", "/etc/os-release"}, {"systemctl", "--version"},
		{"kubelet", "--version"}, {"k3s", "--version"}, {"rke2", "--version"}, {"k0s", "version"},
		{"containerd", "--version"}, {"crio", "--version"}, {"podman", "--version"}, {"crictl", "version"},
		{"df", "-h", kubelet, "/run"}, {"df", "-i", kubelet, "/run"}, {"cat", "/proc/self/mountinfo"},
	} {
		if _, err := exec.LookPath(c[0]); err != nil {
			continue // a node has only some of them
		}
		fmt.Fprintf(w, "\n$ %s\n", safetext.Run(c[0], c[1:]...))
		errs = append(errs, briefCommand(ctx, w, c[0], c[1:]...))
	}
	return errors.Join(errs...)
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

// briefCommand writes the output of a command that takes no time unless a file system does not
// answer.
func briefCommand(ctx context.Context, w io.Writer, name string, args ...string) error {
	ctx, cancel := context.WithTimeout(ctx, fileLimit)
	defer cancel()
	return bugreport.Command(name, args...)(ctx, w)
}

// writeFiles lists the directories of the daemon, the kubelet and the drivers, each with a command
// of its own, because one that does not answer must not hide the others, and the volumes.
func writeFiles(ctx context.Context, w io.Writer, root string) error {
	if _, err := exec.LookPath("ls"); err != nil {
		return err
	}
	source, run := config.Source{Root: root}, filepath.Dir(control.Path(root))
	dirs := append(source.Watch(), run, filepath.Join(run, "registrations"))
	res, err := loadConfig(ctx, source)
	if err == nil {
		kubelet := res.Config.Kubelet.RootDir
		dirs = append(dirs, rootdir.PluginsRegistry(kubelet), filepath.Join(kubelet, "plugins"))
		for _, d := range res.Config.Drivers {
			dirs = append(dirs, filepath.Dir(d.Socket), filepath.Dir(d.Endpoint))
		}
	}
	errs := []error{err}
	slices.Sort(dirs)
	for _, dir := range slices.Compact(dirs) {
		fmt.Fprintf(w, "%s:\n", safetext.Word(dir))
		err := briefCommand(ctx, w, "ls", "-labn", "--time-style=full-iso", "--", dir)
		// If ls has exited, it has said why.
		if x, ok := errors.AsType[*exec.ExitError](err); !ok || !x.Exited() {
			errs = append(errs, err)
		}
	}
	if res != nil {
		kubelet := res.Config.Kubelet.RootDir
		all, err := worker.Get(ctx, worker.NewPool().Slot(kubelet, nil), fileLimit, func() ([]volumes.Volume, error) {
			return volumes.Read(kubelet, "/proc", 0)
		}, nil)
		errs = append(errs, err)
		for _, v := range all {
			fmt.Fprintf(w, "%s: mounted %t, written %s\n", safetext.Word(v.Target), v.Mounted, v.Changed.UTC().Format(time.RFC3339))
		}
	}
	return errors.Join(errs...)
}
