package config

import (
	"cmp"
	"fmt"
	"maps"
	"path"
	"slices"

	"csi-registrar/internal/node/csiname"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/unixsock"
)

// result checks the files as a whole, and returns the Result.
func (l *loader) result() *Result {
	tables := slices.SortedFunc(maps.Values(l.drivers), func(a, b *table) int {
		return cmp.Or(cmp.Compare(l.rank[a.first.file], l.rank[b.first.file]), cmp.Compare(a.first.order, b.first.order))
	})
	var valid, faulty []*table // a faulty table must not take the socket of a valid one
	for _, t := range tables {
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

	for _, t := range tables {
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
	l.Errors = sorted(l.Errors, l.rank)
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
