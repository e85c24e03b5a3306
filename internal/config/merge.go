package config

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"csi-registrar/internal/status"
)

// position is where something is written.
type position struct {
	file file
	line int
}

func (p position) String() string { return place(p.file.path, p.line) }

// compare is negative if p is read before o.
func (p position) compare(o position) int {
	return cmp.Or(cmp.Compare(p.file.rank, o.file.rank), cmp.Compare(p.line, o.line))
}

// loader merges files, one after the other.
type loader struct {
	userExists func(name string) error

	kubelet Kubelet
	log     Log
	drivers map[string]*table
	read    []string
	rank    map[string]int // of each file, also one that cannot be read
	// origins has the place of each value that is in force; main that of each value in
	// the main file in /etc.
	origins, main map[string]position

	mistakes []Mistake
}

// table is a driver's table as far as it is known.
type table struct {
	Driver
	first     position // where it is named first
	hasSocket bool     // it says what the socket is, right or wrong
	faulty    bool
}

func newLoader(userExists func(name string) error) *loader {
	defaults := Default()
	return &loader{
		userExists: userExists,
		kubelet:    defaults.Kubelet,
		log:        defaults.Log,
		drivers:    make(map[string]*table),
		rank:       make(map[string]int),
		origins:    make(map[string]position),
		main:       make(map[string]position),
	}
}

// driver is the table of a driver, made if it was not named before.
func (l *loader) driver(name string, at position) *table {
	t, known := l.drivers[name]
	if !known {
		t = &table{Driver: DefaultDriver(name, ""), first: at}
		l.drivers[name] = t
	}
	return t
}

// apply puts what a file says over what was said before it. Each value is judged where
// it is, also one that a later file overrides.
func (l *loader) apply(f file, data string) {
	doc, wrong := parse(data)
	for _, b := range wrong {
		l.mistakes = append(l.mistakes, Mistake{f.path, b.line, clip(b.key), b.problem, b.hint})
		if b.driver != "" {
			t := l.driver(b.driver, position{f, b.line})
			t.faulty, t.hasSocket = true, true // it may well have one
		}
	}
	r := &reading{loader: l, file: f, spots: doc.spots}
	for _, key := range r.sorted(doc.tree) {
		r.top(key, doc.tree[key])
	}
}

// reading is the work on one document.
type reading struct {
	*loader
	file  file
	spots spots
}

// at is the place of a key.
func (r *reading) at(path ...string) position { return position{r.file, r.spots.find(path).line} }

// sorted gives the keys of the table at path in the order in which they are written.
func (r *reading) sorted(m map[string]any, path ...string) []string {
	lines := make(map[string]int, len(m))
	for k := range m {
		lines[k] = r.at(below(path, k)...).line
	}
	return slices.SortedFunc(maps.Keys(m), func(a, b string) int {
		return cmp.Or(cmp.Compare(lines[a], lines[b]), strings.Compare(a, b))
	})
}

func below(path []string, key string) []string { return append(slices.Clip(path), key) }

// wrong notes a mistake at a key.
func (r *reading) wrong(problem, hint string, path ...string) {
	r.mistakes = append(r.mistakes,
		Mistake{r.file.path, r.at(path...).line, clip(keyString(path...)), problem, hint})
}

// top reads one of the tables at the top of a document.
func (r *reading) top(key string, v any) {
	known := []string{"kubelet", "log", "driver"}
	m, isTable := v.(map[string]any)
	switch {
	case !slices.Contains(known, key):
		hint := unknownKey(key, known)
		if name := unquoted(key, v); name != "" && nearest(key, known) == "" {
			hint = "did you mean [driver." + shown(name) + "]?"
		}
		r.wrong("is not known", hint, key)
	case !isTable && key == "driver":
		r.wrong("is "+describe(v, r.spots.find([]string{key}).text), `must be tables [driver."NAME"]`, key)
	case !isTable:
		r.wrong("is "+describe(v, r.spots.find([]string{key}).text), "must be the table ["+key+"]", key)
	case key == "kubelet":
		fill(r, &r.kubelet, kubeletFields(), m, key)
	case key == "log":
		fill(r, &r.log, logFields(), m, key)
	default:
		for _, name := range r.sorted(m, key) {
			r.driverTable(name, m[name])
		}
	}
}

// driverTable reads a driver's table.
func (r *reading) driverTable(name string, v any) {
	path := []string{"driver", name}
	m, isTable := v.(map[string]any)
	if !isTable {
		hint := "must be a table: [" + keyString(path...) + "], in single brackets"
		if slices.Contains(keys(driverFields(nil)), name) {
			hint = `it belongs in a table [driver."NAME"]`
		} else {
			t := r.loader.driver(name, r.at(path...))
			t.faulty, t.hasSocket = true, true
		}
		r.wrong("is "+describe(v, r.spots.find(path).text), hint, path...)
		return
	}
	t := r.loader.driver(name, r.at(path...))
	if err := status.CheckName(name); err != nil {
		r.wrong("is "+clean(err.Error()), "must be the name that the driver answers to GetPluginInfo", path...)
		t.faulty, t.hasSocket = true, true
	}
	if !fill(r, &t.Driver, driverFields(r.userExists), m, path...) {
		t.faulty = true
	}
	if _, has := m["socket"]; has || len(m) > 0 && allTables(m) {
		t.hasSocket = true // of tables only: the name was not quoted, which is said already
	}
}

// fill puts the values of a table into t and tells whether all of them are right.
func fill[T any](r *reading, t *T, fields []field[T], m map[string]any, path ...string) bool {
	right := true
	for _, key := range r.sorted(m, path...) {
		at := below(path, key)
		i := slices.IndexFunc(fields, func(f field[T]) bool { return f.key == key })
		if i < 0 {
			hint := unknownKey(key, keys(fields))
			if path[0] == "driver" {
				if name := unquoted(path[1]+"."+key, m[key]); name != "" {
					hint = "a name with dots must be in quotes: [driver." + shown(name) + "]"
				}
			}
			r.wrong("is not known", hint, at...)
			right = false
			continue
		}
		spot := r.spots.find(at)
		if bad := fields[i].set(t, value{m[key], spot}); bad != nil {
			r.mistakes = append(r.mistakes, Mistake{r.file.path, cmp.Or(bad.line, spot.line), keyString(at...),
				bad.problem, cmp.Or(bad.hint, fields[i].want)})
			right = false
			continue
		}
		where := position{r.file, spot.line}
		r.origins[keyString(at...)] = where
		if r.file.place == etc && !r.file.dropIn {
			r.main[keyString(at...)] = where
		}
	}
	return right
}

// unquoted is the driver's name that was meant by a table within a table, empty if none
// was: a.b.c of [a.b.c], in which there is a driver's key.
func unquoted(name string, v any) string {
	m, isTable := v.(map[string]any)
	if !isTable {
		return ""
	}
	for key := range m {
		if slices.Contains(keys(driverFields(nil)), key) {
			return name
		}
	}
	for key, v := range m {
		return unquoted(name+"."+key, v)
	}
	return ""
}

func allTables(m map[string]any) bool {
	for _, v := range m {
		if _, isTable := v.(map[string]any); !isTable {
			return false
		}
	}
	return true
}
