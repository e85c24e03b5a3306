// Package config reads the configuration files into one immutable Config, and reports every error
// in them with its place.
//
// A file that cannot be parsed is left out, and so is the table of a driver that has an error.
// Load returns the valid part and the errors; its caller decides whether to use that or an earlier
// configuration.
package config

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"path"
	"reflect"
	"slices"
	"strings"
	"text/tabwriter"

	"csi-registrar/internal/node/csiname"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/unixsock"
)

// Config is the merged configuration of all files. It is not changed after Load, so it may be
// shared between goroutines.
type Config struct {
	Kubelet Kubelet
	Log     Log
	Drivers []Driver // sorted by name, no name twice
}

// Kubelet is the table [kubelet].
type Kubelet struct {
	RootDir string // absolute and clean
}

// PluginsRegistry is the directory in which the kubelet looks for registration sockets.
func (k Kubelet) PluginsRegistry() string { return rootdir.PluginsRegistry(k.RootDir) }

// Log is the table [log].
type Log struct {
	Level  string // debug, info, warn or error
	Format string // auto, journal, text or json
}

// Default returns the configuration without files: it has no drivers.
func Default() *Config {
	return &Config{Kubelet: defaults(kubeletFields()), Log: defaults(logFields())}
}

// DefaultDriver returns a table that has only a name and a socket.
func DefaultDriver(name, socket string) Driver {
	d := defaults(driverFields())
	d.Name, d.Socket, d.Endpoint = name, socket, socket
	return d
}

// Table returns the lines of the driver's table in TOML, without keys that have their default.
func (d Driver) Table() []string {
	lines := []string{fmt.Sprintf("[driver.%q]", d.Name), "socket = " + literal(d.Socket)}
	byDefault := DefaultDriver(d.Name, d.Socket)
	for _, f := range driverFields() {
		if value := literal(f.get(d)); value != literal(f.get(byDefault)) {
			lines = append(lines, f.key+" = "+value)
		}
	}
	return lines
}

// UnmarshalJSON implements json.Unmarshaler: a key that an earlier version did not know has its
// default.
func (d *Driver) UnmarshalJSON(data []byte) error {
	type plain Driver // without this method
	*d = defaults(driverFields())
	return json.Unmarshal(data, (*plain)(d))
}

// Equal reports whether both tables have the same values.
func (d Driver) Equal(o Driver) bool {
	return reflect.DeepEqual(d, o)
}

// Equal reports whether both configurations have the same values, whatever their origin.
func (c *Config) Equal(o *Config) bool {
	return c.Kubelet == o.Kubelet && c.Log == o.Log &&
		slices.EqualFunc(c.Drivers, o.Drivers, Driver.Equal)
}

func sortByName(drivers []Driver) {
	slices.SortFunc(drivers, func(a, b Driver) int { return strings.Compare(a.Name, b.Name) })
}

// Driver finds a driver by name.
func (c *Config) Driver(name string) (Driver, bool) {
	i, ok := slices.BinarySearchFunc(c.Drivers, name, func(d Driver, name string) int { return strings.Compare(d.Name, name) })
	if !ok {
		return Driver{}, false
	}
	return c.Drivers[i], true
}

// result checks the files as a whole, and returns the Result.
func (l *loader) result() *Result {
	var valid, faulty []*table // a faulty table must not take the socket of a valid one
	for _, t := range l.tables {
		if !l.leftOut(t.Name) {
			l.checkTable(t)
		}
		if l.leftOut(t.Name) {
			faulty = append(faulty, t)
		} else {
			valid = append(valid, t)
		}
	}
	l.checkShared(append(valid, faulty...))

	for _, t := range l.tables {
		if l.leftOut(t.Name) {
			l.faulty[t.Name] = true
			continue
		}
		t.Endpoint = cmp.Or(t.Endpoint, t.Socket)
		l.Config.Drivers = append(l.Config.Drivers, t.Driver)
	}
	sortByName(l.Config.Drivers)
	for _, name := range slices.Sorted(maps.Keys(l.faulty)) {
		if csiname.CheckName(name) == nil {
			l.Faulty = append(l.Faulty, name)
		}
	}
	slices.SortStableFunc(l.Errors, func(a, b Error) int {
		return cmp.Or(cmp.Compare(l.rank[a.File], l.rank[b.File]), strings.Compare(a.File, b.File),
			cmp.Compare(a.Line, b.Line), strings.Compare(a.Key, b.Key))
	})
	l.Errors = slices.CompactFunc(l.Errors, func(a, b Error) bool { return a.Error() == b.Error() })
	return &l.Result
}

// checkTable rejects a table without the only required key (often one that tunes a driver whose
// package was removed), and one for which the path of the registration socket would be too long.
func (l *loader) checkTable(t *table) {
	if t.Socket == "" {
		l.reject(t.Name, t.first.error("has no socket",
			`write socket = "/run/….sock"; if the table only tunes a driver whose own file was removed, remove it`))
	}
	path := path.Join(l.Config.Kubelet.PluginsRegistry(), rootdir.SocketName(t.Name))
	if over := len(path) - unixsock.MaxPath; over > 0 {
		l.reject(t.Name, t.first.error(
			fmt.Sprintf("the path of its registration socket, %s, would have %d bytes, a Unix socket's has at most %d", safetext.Quote(path), len(path), unixsock.MaxPath),
			fmt.Sprintf("make kubelet.root_dir shorter by %d", over)))
	}
}

// checkShared rejects drivers with the socket of an earlier one: one driver listens at a socket.
// Tables that are not enabled do not count, so that the old table of a driver that changed its name
// can be disabled.
func (l *loader) checkShared(tables []*table) {
	claims := make(map[string]string) // the key that has a path
	for _, t := range tables {
		if !t.Enabled || csiname.CheckName(t.Name) != nil {
			continue
		}
		shared := false
		mine := [...]struct{ key, path string }{{"endpoint", t.Endpoint}, {"socket", t.Socket}}
		for _, m := range mine {
			key := keyString("driver", t.Name, m.key)
			if theirs, ok := claims[m.path]; ok {
				shared = true
				l.reject(t.Name, l.origins[key].error(fmt.Sprintf("is %s, which is also %s (%s)", safetext.Quote(m.path), theirs, l.origins[theirs]),
					"each driver has its own: write enabled = false in one of the tables, or another path"))
			}
		}
		for _, m := range mine {
			if m.path != "" && !shared {
				claims[m.path] = keyString("driver", t.Name, m.key)
			}
		}
	}
}

// Show returns the merged configuration as a valid TOML file, in which each value has a comment
// with its origin.
func (r *Result) Show() string {
	var text strings.Builder
	b := tabwriter.NewWriter(&text, 0, 0, 1, ' ', 0)
	if len(r.Files) == 0 {
		fmt.Fprintln(b, "# No configuration file: these are the defaults.")
	} else {
		fmt.Fprintln(b, "# From these files, in order:")
	}
	for _, f := range r.Files {
		fmt.Fprintln(b, "#  ", safetext.Word(f))
	}
	for _, h := range r.Hidden {
		fmt.Fprintf(b, "# Hidden: %s, by %s\n", safetext.Word(h.File), safetext.Word(h.By))
	}
	for _, name := range r.Faulty {
		fmt.Fprintln(b, "# Left out for an error:", keyString("driver", name))
	}
	showTable(b, r, r.Config.Kubelet, kubeletFields(), "kubelet")
	showTable(b, r, r.Config.Log, logFields(), "log")
	for _, d := range r.Config.Drivers {
		showTable(b, r, d, driverFields(), "driver", d.Name)
	}
	b.Flush() // to memory
	return text.String()
}

// showTable writes a table with aligned columns.
func showTable[T any](b *tabwriter.Writer, r *Result, t T, fields []field[T], path ...string) {
	table := keyString(path...)
	fmt.Fprintf(b, "\n[%s]\n", table)
	for _, f := range fields {
		from := r.Origin(table + "." + f.key)
		if from != "default" {
			from = "from " + from
		}
		fmt.Fprintf(b, "%s\t= %s \t# %s\n", f.key, literal(f.get(t)), from)
	}
}
