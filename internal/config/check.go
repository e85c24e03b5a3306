package config

import (
	"cmp"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

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

	r := &Result{Config: &Config{Kubelet: l.kubelet, Log: l.log}, Files: l.files, origins: l.origins}
	for _, t := range tables {
		if l.heldBack(t.Name) {
			l.faulty[t.Name] = true
			continue
		}
		t.Endpoint = cmp.Or(t.Endpoint, t.Socket)
		r.Config.Drivers = append(r.Config.Drivers, t.Driver)
	}
	slices.SortFunc(r.Config.Drivers, func(a, b Driver) int { return strings.Compare(a.Name, b.Name) })
	for _, name := range slices.Sorted(maps.Keys(l.faulty)) {
		if status.CheckName(name) == nil {
			r.Faulty = append(r.Faulty, name)
		}
	}
	r.Errors = sorted(l.errors, l.rank)
	r.Warnings = sorted(append(l.overrides(), similar(tables)...), l.rank)
	return r
}

// spoil notes an error that leaves a driver out.
func (l *loader) spoil(t *table, at position, key, problem, hint string) {
	l.errors = append(l.errors, Error{at.file.path, at.line(), key, problem, hint})
	l.faulty[t.Name] = true
}

// checkTable finds a table without the only key that it must have, which is often one that
// tunes a driver whose package is gone, and one whose registration socket would have too
// long a path.
func (l *loader) checkTable(t *table) {
	key := keyString("driver", t.Name)
	if !t.hasSocket {
		l.spoil(t, t.first, key, "has no socket",
			`write socket = "/run/….sock"; if the table only tunes a driver whose own file is gone, take it out`)
	}
	// The name that node-driver-registrar uses too.
	socket := path.Join(l.kubelet.PluginsRegistry(), t.Name+"-reg.sock")
	if over := len(socket) - unixsock.MaxPath; over > 0 {
		root := "kubelet.root_dir"
		if at, written := l.origins[root]; written {
			root += " (" + at.String() + ")"
		}
		l.spoil(t, t.first, key,
			fmt.Sprintf("the path of its registration socket, %s, would have %d bytes, a Unix socket's has at most %d",
				shown(socket), len(socket), unixsock.MaxPath),
			fmt.Sprintf("make %s shorter by %d", root, over))
	}
}

// checkShared finds drivers that name the same socket. At one socket there is one
// driver, so one of the two names is wrong; the one that is written first keeps its
// place. Tables that are not enabled do not count: of a driver that changed its name the
// old one can be switched off.
func (l *loader) checkShared(tables []*table) {
	type claim struct {
		key string // of a driver's table
		*table
	}
	claims := make(map[string]claim)
	for _, t := range tables {
		if !t.Enabled || status.CheckName(t.Name) != nil {
			continue
		}
		mine := map[string]string{"socket": t.Socket, "endpoint": t.Endpoint}
		shared := false
		for _, key := range []string{"socket", "endpoint"} {
			other, taken := claims[mine[key]]
			if !taken || mine[key] == "" {
				continue
			}
			shared = true
			theirs := keyString("driver", other.Name, other.key)
			l.spoil(t, l.origins[keyString("driver", t.Name, key)], keyString("driver", t.Name, key),
				fmt.Sprintf("is %s, which is also %s (%s)", shown(mine[key]), theirs, l.origins[theirs]),
				"each driver has its own: write enabled = false in one of the tables, or another path")
		}
		for key, p := range mine {
			if p != "" && !shared {
				claims[p] = claim{key, t}
			}
		}
	}
}

// overrides warns of each value of the main file in /etc that a package's drop-in
// overrides: whoever wrote it there may think that it counts. (Beside a main file in
// /etc only drop-ins are read from /usr/lib.)
func (l *loader) overrides() []Error {
	var found []Error
	for key, at := range l.origins {
		if main, has := l.main[key]; has && at.file.place == lib {
			found = append(found, Error{at.file.path, at.line(), key, "overrides " + main.String(),
				"what shall count is best written in a drop-in in /etc/csi-registrar/conf.d, numbered 60 to 90"})
		}
	}
	return found
}

// similar warns of names that differ only in case. The API server and the kubelet take
// them for two drivers; people seldom mean that.
func similar(tables []*table) []Error {
	var found []Error
	seen := make(map[string]*table)
	for _, t := range tables {
		lower := strings.ToLower(t.Name)
		if o, known := seen[lower]; known {
			found = append(found, Error{t.first.file.path, t.first.line(), keyString("driver", t.Name),
				fmt.Sprintf("differs from %s (%s) only in case", keyString("driver", o.Name), o.first),
				"they are two drivers to the kubelet; if one is meant, write its name as the driver answers it"})
		} else if t.Socket != "" { // without one it is an error already
			seen[lower] = t
		}
	}
	return found
}
