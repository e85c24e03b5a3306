package doctor

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/csiname"
	"csi-registrar/internal/sys/safetext"
)

// withoutTable reports drivers whose volumes are in use and that have no enabled table: the kubelet
// cannot unmount the volumes of one that nobody registers, and the daemon withdraws one that it
// still registers as soon as they are unmounted.
func (x *diagnosis) withoutTable(ctx context.Context) {
	var names []string
	for _, v := range x.volumes {
		d, _ := x.config.Config.Driver(v.Driver)
		invalid := slices.Contains(x.config.Faulty, v.Driver) // which is reported
		if x.selected(v.Driver) && csiname.CheckName(v.Driver) == nil && !d.Enabled && !invalid && !slices.Contains(names, v.Driver) {
			names = append(names, v.Driver)
		}
	}
	slices.Sort(names)
	for _, name := range names {
		inUse := count(x.volumesOf(name), "volume") + " in use, "
		_, disabled := x.config.Config.Driver(name)
		switch st, _ := x.daemon.Driver(name); {
		case st.NoTable:
			why, fix := x.lookalike(ctx, name)
			x.finding(name, "configuration", "driver-without-table", inUse+"and no table: it is withdrawn when they are unmounted"+why,
				"a table, or no volumes", fix...)
		case len(x.served[name]) > 0:
		case disabled:
			x.finding(name, "volumes", "volumes-unregistered", inUse+"which the kubelet cannot unmount: nobody registers the driver, whose table has enabled = false",
				"the driver is registered until they are unmounted", x.setDriverKey(name, "enabled", "true")...)
		default:
			why, fix := x.lookalike(ctx, name)
			x.finding(name, "volumes", "volumes-unregistered", inUse+"which the kubelet cannot unmount: nobody registers the driver"+why,
				"the driver is registered until they are unmounted", fix...)
		}
	}
}

// lookalike finds a file that has a table of the driver and is not read because of its name, or the
// socket at which the driver answers. It returns a part of a sentence, which can be empty, and the
// fix.
func (x *diagnosis) lookalike(ctx context.Context, driver string) (why string, fix []Fix) {
	for _, dir := range x.o.Source.Watch() {
		if filepath.Base(dir) != "conf.d" {
			continue
		}
		file, err := look(ctx, x, dir, func() (string, error) { return ignoredTable(dir, driver) })
		if err != nil || file == "" {
			continue
		}
		name, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(file), "."), ".toml")
		name = strings.TrimSuffix(name, ".conf") + ".toml"
		return "; " + safetext.Word(file) + " has a table for it, and is not read: its name does not end in .toml or begins with a dot",
			[]Fix{run("mv", "-n", file, filepath.Join(dir, name)), reload}
	}
	var d config.Driver
	d.Name, d.Socket, d.SocketOwner = driver, filepath.Join(x.config.Config.Kubelet.RootDir, "plugins", driver, "csi.sock"), "root"
	if socket := x.nearby(ctx, d); socket != "" {
		return "; it listens on " + safetext.Word(socket), x.setDriverKey(driver, "socket", safetext.Quote(socket))
	}
	return "", []Fix{note("write a table for %s with its socket into a file in %s", safetext.ShellWord(driver), safetext.ShellWord(x.confDir()))}
}

// ignoredTable returns a file in dir with a table of the driver that config.Load ignores.
func ignoredTable(dir, driver string) (string, error) {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		name, file := e.Name(), filepath.Join(dir, e.Name())
		if !e.Type().IsRegular() || strings.HasSuffix(name, ".toml") && !strings.HasPrefix(name, ".") {
			continue
		}
		r := config.Load(config.Source{File: file})
		if _, ok := r.Config.Driver(driver); ok || slices.Contains(r.Faulty, driver) {
			return file, nil
		}
	}
	return "", err
}
