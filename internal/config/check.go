package config

import (
	"cmp"
	"fmt"
	"maps"
	"path"
	"slices"

	"csi-registrar/internal/safetext"
	"csi-registrar/internal/status"
	"csi-registrar/internal/unixsock"
)

// result looks at all files together: what no single value shows.
func (l *loader) result() *Result {
	tables := slices.SortedFunc(maps.Values(l.drivers), func(a, b *table) int {
		return cmp.Or(cmp.Compare(a.first.file.rank, b.first.file.rank), cmp.Compare(a.first.order, b.first.order))
	})
	var right, left []*table // a table that is left out anyway shall cost no other its place
	for _, t := range tables {
		if !l.heldBack(t.Name) {
			l.checkTable(t)
		}
		if l.heldBack(t.Name) {
			left = append(left, t)
		} else {
			right = append(right, t)
		}
	}
	l.checkShared(append(right, left...))

	for _, t := range tables {
		if l.heldBack(t.Name) {
			l.faulty[t.Name] = true
			continue
		}
		t.Endpoint = cmp.Or(t.Endpoint, t.Socket)
		l.Config.Drivers = append(l.Config.Drivers, t.Driver)
	}
	sortByName(l.Config.Drivers)
	for _, name := range slices.Sorted(maps.Keys(l.faulty)) {
		if status.CheckName(name) == nil {
			l.Faulty = append(l.Faulty, name)
		}
	}
	l.Errors = sorted(l.Errors, l.rank)
	return &l.Result
}

// checkTable finds a table without the only key that it must have, which is often one that
// tunes a driver whose package is gone, and one whose registration socket or endpoint link
// would have too long a path.
func (l *loader) checkTable(t *table) {
	if t.Socket == "" {
		l.spoil(t.Name, t.first.error("has no socket",
			`write socket = "/run/….sock"; if the table only tunes a driver whose own file is gone, take it out`))
	}
	// The name that node-driver-registrar uses too.
	l.checkMade(t, "registration socket", path.Join(l.Config.Kubelet.PluginsRegistry(), t.Name+"-reg.sock"))
	if t.EndpointLink {
		l.checkMade(t, "endpoint link", l.Config.Kubelet.EndpointLink(t.Name))
	} else if bad := checkLength(t.Endpoint); bad != nil { // who connects through a link may go further
		l.spoil(t.Name, l.origins[keyString("driver", t.Name, "endpoint")].error(bad.problem, bad.hint+", or write endpoint_link = true"))
	}
}

// checkMade checks the length of a path that the daemon makes.
func (l *loader) checkMade(t *table, what, path string) {
	if over := len(path) - unixsock.MaxPath; over > 0 {
		l.spoil(t.Name, t.first.error(
			fmt.Sprintf("the path of its %s, %s, would have %d bytes, a Unix socket's has at most %d", what, safetext.Quote(path), len(path), unixsock.MaxPath),
			fmt.Sprintf("make kubelet.root_dir shorter by %d", over)))
	}
}

// checkShared finds drivers that name the same socket. At one socket there is one
// driver, so one of the two names is wrong; the one that is written first keeps its
// place. Tables that are not enabled do not count: of a driver that changed its name the
// old one can be switched off.
func (l *loader) checkShared(tables []*table) {
	claims := make(map[string]string) // the key that has a path
	for _, t := range tables {
		if !t.Enabled || status.CheckName(t.Name) != nil {
			continue
		}
		shared := false
		mine := [...]struct{ key, path string }{{"endpoint", t.Endpoint}, {"socket", t.Socket}}
		for _, m := range mine {
			key := keyString("driver", t.Name, m.key)
			if theirs, claimed := claims[m.path]; claimed {
				shared = true
				l.spoil(t.Name, l.origins[key].error(fmt.Sprintf("is %s, which is also %s (%s)", safetext.Quote(m.path), theirs, l.origins[theirs]),
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
