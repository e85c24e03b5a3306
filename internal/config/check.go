package config

import (
	"cmp"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"csi-registrar/internal/status"
)

// result looks at all files together: what no single value shows.
func (l *loader) result() *Result {
	tables := slices.SortedFunc(maps.Values(l.drivers), func(a, b *table) int {
		return cmp.Or(a.first.compare(b.first), strings.Compare(a.Name, b.Name))
	})
	var whole []string
	for _, t := range tables {
		if t.Socket != "" {
			whole = append(whole, t.Name)
		}
	}
	for _, t := range tables {
		l.checkSocket(t, whole)
		l.checkRegistration(t)
	}
	// A table that is left out anyway shall cost no other its place.
	left := slices.DeleteFunc(slices.Clone(tables), func(t *table) bool { return !t.faulty })
	l.checkShared(append(slices.DeleteFunc(slices.Clone(tables), func(t *table) bool { return t.faulty }), left...))

	r := &Result{
		Config:   &Config{Kubelet: l.kubelet, Log: l.log},
		Files:    l.read,
		Mistakes: sortMistakes(l.mistakes, l.rank),
		Warnings: sortMistakes(append(l.overrides(), similar(tables)...), l.rank),
		origins:  l.origins,
	}
	for _, t := range tables {
		switch {
		case !t.faulty:
			t.Endpoint = cmp.Or(t.Endpoint, t.Socket)
			r.Config.Drivers = append(r.Config.Drivers, t.Driver)
		case status.CheckName(t.Name) == nil:
			r.Faulty = append(r.Faulty, t.Name)
		}
	}
	slices.SortFunc(r.Config.Drivers, func(a, b Driver) int { return strings.Compare(a.Name, b.Name) })
	slices.Sort(r.Faulty)
	return r
}

// spoil notes a mistake that makes a driver's table unusable.
func (l *loader) spoil(t *table, at position, key, problem, hint string) {
	l.mistakes = append(l.mistakes, Mistake{at.file.path, at.line, key, problem, hint})
	t.faulty = true
}

// checkSocket finds a table without the only key that it must have. It is often one that
// tunes a driver whose package is gone. others are the drivers that have a socket.
func (l *loader) checkSocket(t *table, others []string) {
	if t.hasSocket {
		return
	}
	hint := `write socket = "/run/….sock"; if the table only tunes a driver whose own file is gone, take it out`
	if near := nearest(t.Name, others); near != "" {
		hint = "did you mean " + keyString("driver", near) + "?"
	}
	l.spoil(t, t.first, keyString("driver", t.Name), "has no socket", hint)
}

// checkRegistration finds a driver whose registration socket would have too long a path.
func (l *loader) checkRegistration(t *table) {
	// The name that node-driver-registrar uses too (spec §2).
	over := len(path.Join(l.kubelet.PluginsRegistry(), t.Name+"-reg.sock")) - maxSocketPath
	if over <= 0 || status.CheckName(t.Name) != nil {
		return
	}
	root := "kubelet.root_dir"
	if at, written := l.origins[root]; written {
		root += " (" + at.String() + ")"
	}
	l.spoil(t, t.first, keyString("driver", t.Name),
		fmt.Sprintf("the path of its registration socket, %s, would have %d bytes, a Unix socket's has at most %d",
			shown(path.Join(l.kubelet.PluginsRegistry(), t.Name+"-reg.sock")), over+maxSocketPath, maxSocketPath),
		"make "+root+" "+shorter(over))
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
func (l *loader) overrides() []Mistake {
	var found []Mistake
	for key, at := range l.origins {
		if main, has := l.main[key]; has && at.file.place == lib {
			found = append(found, Mistake{at.file.path, at.line, key, "overrides " + main.String(),
				"what shall count is best written in a drop-in in /etc/csi-registrar/conf.d, numbered 60 to 90"})
		}
	}
	return found
}

// similar warns of names that differ only in case. The API server and the kubelet take
// them for two drivers; people seldom mean that.
func similar(tables []*table) []Mistake {
	var found []Mistake
	seen := make(map[string]*table)
	for _, t := range tables {
		if t.Socket == "" {
			continue // said already
		}
		lower := strings.ToLower(t.Name)
		if o, known := seen[lower]; known {
			found = append(found, Mistake{t.first.file.path, t.first.line, keyString("driver", t.Name),
				fmt.Sprintf("differs from %s (%s) only in case", keyString("driver", o.Name), o.first),
				"they are two drivers to the kubelet; if one is meant, write its name as the driver answers it"})
			continue
		}
		seen[lower] = t
	}
	return found
}
