package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"csi-registrar/internal/node/volumes"
	"csi-registrar/internal/sys/safetext"
)

// podName returns the namespace and the name of a pod by the kubelet's directories of its logs, or
// its UID.
func (x *diagnosis) podName(ctx context.Context, uid string) (namespace, name string) {
	dir := filepath.Join(x.o.Root, "var/log/pods")
	entries, _ := look(ctx, x, dir, func() ([]os.DirEntry, error) { return os.ReadDir(dir) })
	for _, e := range entries {
		parts := strings.Split(e.Name(), "_")
		if len(parts) == 3 && parts[2] == uid && safetext.ShellWord(e.Name()) == e.Name() {
			return parts[0], parts[1]
		}
	}
	return "", uid
}

// describe lists volumes, with their pods, and how much was written below.
func (x *diagnosis) describe(ctx context.Context, all []misplaced) string {
	var texts []string
	for _, w := range all {
		text := safetext.Word(w.Dir)
		if w.Pod != "" {
			text += " (pod " + safetext.Word(path.Join(x.podName(ctx, w.Pod))) + x.written(ctx, w) + ")"
		}
		texts = append(texts, text)
	}
	return safetext.Some(texts, 5)
}

// written counts what is in the directory below a mount, as the rest of a sentence; empty if it
// cannot be seen.
func (x *diagnosis) written(ctx context.Context, w misplaced) string {
	dir := w.Target
	switch {
	case len(w.pods) > 0:
		dir = x.procPath(w.pods[0].pid, "root", w.pods[0].Point)
	case w.Mounted:
		return ""
	}
	var size int64
	var files int
	err := x.check(ctx, dir, func() error {
		return filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
			if err != nil || !e.Type().IsRegular() {
				return err
			}
			if files++; files > maxEntries {
				return errors.New("there are more")
			}
			info, err := e.Info()
			if err == nil {
				size += info.Size()
			}
			return err
		})
	})
	if err != nil {
		return ", which has written an unknown number of bytes there"
	}
	return fmt.Sprintf(", %s in %s", safetext.Count(int(size), "byte"), safetext.Count(files, "file"))
}

// saved is where the fix moves what pods have written in the wrong place.
const saved = "/var/lib/csi-saved"

func savedIn(v volumes.Volume) string { return path.Join(saved, v.Pod, path.Base(v.Dir)) }

// rescue returns the commands that save what pods have written, repair the driver, and give the
// pods their volumes. A restarted kubelet mounts what is missing.
func (x *diagnosis) rescue(ctx context.Context, all []misplaced, repair []Fix, inPod bool) []Fix {
	if !slices.ContainsFunc(all, func(w misplaced) bool { return w.Pod != "" }) { // staged
		return repair
	}
	fix := []Fix{note("in this order nothing is lost. A restart of the kubelet alone mounts the volumes over what the pods have written, and they go on writing below")}
	if inPod { // it is replaced while the kubelet runs
		fix, repair = append(fix, repair...), nil
	}
	fix = append(fix, systemctl("stop", x.kubelet.service()))
	_, noCrictl := exec.LookPath("crictl")
	var stopped []string
	for _, w := range all {
		for _, m := range w.pods {
			p, _ := x.process(ctx, m.pid)
			pid := strconv.Itoa(m.pid)
			switch {
			case p.container == "" || noCrictl != nil:
				// The first process of a container ignores signals that it does not handle.
				fix = append(fix, note("end the container of process %s, which only the kubelet starts again", pid), run("kill", pid),
					run("timeout", "30", "tail", "--pid="+pid, "-f", "/dev/null"), run("kill", "-KILL", pid))
			case !slices.Contains(stopped, p.container):
				stopped = append(stopped, p.container)
				fix = append(fix, run("crictl", "stop", "--timeout", "30", p.container))
			}
		}
	}
	var last []Fix
	for _, w := range all {
		if w.Pod == "" {
			continue
		}
		to := savedIn(w.Volume)
		// The pod of a volume that was saved may write there still.
		if len(w.pods) == 0 || slices.ContainsFunc(w.pods, func(m podMount) bool { return !strings.Contains(m.Root+"/", to+"/") }) {
			if w.Mounted {
				fix = append(fix, run("umount", w.Target))
			}
			fix = append(fix, run("mkdir", "-p", "-m", "700", to), run("find", w.Target, "-maxdepth", "0", "-not", "-empty", "-exec", "mv", "--backup=numbered", "-t", to, "{}", "+"),
				run("mkdir", "-p", "-m", "750", w.Target))
		}
		namespace, name := x.podName(ctx, w.Pod)
		last = append(last, note("where kubectl works: kubectl -n %s delete pod %s, then copy %s into the volume of the new pod", safetext.ShellWord(namespace), safetext.ShellWord(name), safetext.ShellWord(to)))
	}
	return slices.Concat(fix, repair, []Fix{systemctl("start", x.kubelet.service())}, last)
}
