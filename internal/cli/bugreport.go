package cli

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"csi-registrar/internal/bugreport"
	"csi-registrar/internal/config"
	"csi-registrar/internal/control"
	"csi-registrar/internal/pluginreg"
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

// kubeletUnits are those of the distributions that doctor knows.
var kubeletUnits = []string{"kubelet.service", "k3s.service", "k3s-agent.service", "rke2-server.service", "rke2-agent.service",
	"k0scontroller.service", "k0sworker.service", "snap.microk8s.daemon-kubelite.service"}

// bugreportParts are the entries of the archive.
func bugreportParts(e *env, root string) []bugreport.Part {
	ours := []string{"csi-registrar.service", "csi-registrar.socket", "csi-registrar-http.socket", "csi-registrar-sweep.service"}
	// The newest lines of the last day, each with its time.
	journal := func(args ...string) func(context.Context, io.Writer) error {
		return bugreport.Command("journalctl", append([]string{"--no-pager", "--quiet", "--output=short-iso-precise", "--since=-24h", "--lines=20000"}, args...)...)
	}
	kubelet := []string{"--grep=plugin|csi"}
	for _, unit := range kubeletUnits {
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
		{Name: "files.txt", Write: func(ctx context.Context, w io.Writer) error {
			return bugreport.Command("ls", append([]string{"-labn", "--time-style=full-iso", "--"}, reportedDirs(root)...)...)(ctx, w)
		}},
	}
}

// ownCommand is what a command of ours prints. That it found something wrong is no failure.
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

// reportedDirs are the directories that are listed.
func reportedDirs(root string) (dirs []string) {
	source := config.Source{Root: root}
	kubelet := config.Load(source).Config.Kubelet.RootDir
	run := filepath.Dir(control.Path(root))
	return append(source.Watch(), run, filepath.Join(run, "registrations"), pluginreg.Dir(kubelet), filepath.Join(kubelet, "plugins"))
}
