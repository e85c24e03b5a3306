package config

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"csi-registrar/internal/node/csiname"
	"csi-registrar/internal/sys/safetext"
)

// Result is the configuration in the files, and the errors in them.
type Result struct {
	// Config is the valid part. A file that cannot be read or parsed is left out, an error in a
	// driver's table leaves out that driver, and one in [log] that value. An error in [kubelet]
	// leaves out all drivers.
	Config *Config
	// Files are the files that were read, in the order in which they were applied.
	Files []string
	// Hidden are files that are not read because of one with the same name, which may be
	// empty or a link to /dev/null.
	Hidden []Hidden
	// Links are the files that are symbolic links: watch them, too.
	Links []string
	// Errors of all files, in the order of the files, then of the lines.
	Errors Errors
	// Faulty names the drivers that are left out for an error, sorted. It has only valid names.
	Faulty []string

	origins map[string]position // of each value that is in force
}

// Origin returns the place where a key, such as driver."nfs.csi.k8s.io".timeout, is set:
// "FILE:LINE", or "default". It is safe to print.
func (r *Result) Origin(key string) string {
	if at, written := r.origins[key]; written {
		return at.String()
	}
	return "default"
}

// LeftOut returns what the errors leave out: the tables of the drivers in Faulty, with the errors
// of each, and the files with errors outside of these tables. Those in [log] leave out nothing, and
// those in [kubelet] all tables.
func (r *Result) LeftOut() (tables map[string]Errors, files []string) {
	tables = map[string]Errors{}
	var kubelet Errors
	for _, e := range r.Errors {
		top, _, _ := strings.Cut(e.Key, ".")
		switch {
		case slices.Contains(r.Faulty, e.Driver):
			tables[e.Driver] = append(tables[e.Driver], e)
		case top == "kubelet":
			kubelet = append(kubelet, e)
		case top != "log" && !slices.Contains(files, e.File):
			files = append(files, e.File)
		}
	}
	for _, name := range r.Faulty {
		if tables[name] == nil {
			tables[name] = kubelet
		}
	}
	return tables, files
}

// Load reads the files. A file that cannot be read is an error in the Result. Load may block for as
// long as a file system does not answer.
func Load(s Source) *Result {
	rule, l := s.rule(), newLoader()
	files := s.list(rule, &l.Result)
	for i, f := range files {
		l.rank[f] = i
		text, err := read(rule, f)
		switch {
		case err != nil:
			l.Errors = append(l.Errors, *err)
		case text != "": // an empty file only hides others
			l.Files = append(l.Files, f)
			l.apply(f, text)
		}
	}
	return l.result()
}

// position is the first place of a key in a file.
type position struct {
	file string
	path []string // of the key
	id   string   // path as TOML writes it
	line int
}

func (p position) String() string { return place(p.file, p.line) }

// error returns an error about the key.
func (p position) error(problem, hint string) Error {
	e := Error{File: p.file, Line: p.line, Key: p.id, Problem: problem, Hint: hint}
	if p.path[0] == "driver" && len(p.path) > 1 {
		e.Driver = p.path[1]
	}
	return e
}

// loader merges files, one after the other.
type loader struct {
	Result
	fields    []field[Driver] // driverFields, made once: there may be thousands of tables
	drivers   map[string]*table
	tables    []*table        // the same, in the order in which they were found
	rank      map[string]int  // of each file, from 0, in the order in which they are applied
	faulty    map[string]bool // drivers that are left out
	noRootDir bool            // [kubelet] has an error: all drivers are left out
}

// table is a driver's table, merged from the files read so far.
type table struct {
	Driver
	first position // of its first key
}

func newLoader() *loader {
	return &loader{
		Result:  Result{Config: Default(), origins: make(map[string]position)},
		fields:  driverFields(),
		drivers: make(map[string]*table),
		rank:    make(map[string]int),
		faulty:  make(map[string]bool),
	}
}

// leftOut reports whether a driver is left out for an error.
func (l *loader) leftOut(name string) bool { return l.noRootDir || l.faulty[name] }

// apply merges a file over those before it. It validates each value, also one that a later file
// overrides.
func (l *loader) apply(file, text string) {
	doc, err := parse(text)
	if err != nil {
		err.File = file
		l.Errors = append(l.Errors, *err)
		return
	}
	isTable := make(map[string]bool) // by key that was read: whether the keys below it count
	for _, key := range doc.keys {
		var v any = doc.tree
		for n := range key.path {
			v = v.(map[string]any)[key.path[n]]
			at := position{file, key.path[:n+1], keyString(key.path[:n+1]...), key.line}
			if _, ok := isTable[at.id]; !ok {
				isTable[at.id] = l.read(at, v)
			}
			if !isTable[at.id] {
				break
			}
		}
	}
}

// read reads a key and reports whether it is a table whose keys count.
func (l *loader) read(at position, v any) bool {
	_, isTable := v.(map[string]any)
	tables := []string{"kubelet", "log", "driver"}
	switch top := at.path[0]; {
	case !slices.Contains(tables, top):
		l.Errors = append(l.Errors, at.error("is not known", knownHere(tables)))
	case len(at.path) == 1 && isTable:
		return true
	case len(at.path) == 1 && top == "driver":
		l.Errors = append(l.Errors, at.error("is not a table", `must be tables [driver."NAME"]`))
	case len(at.path) == 1:
		l.Errors = append(l.Errors, at.error("is not a table", "must be the table ["+top+"]"))
		l.noRootDir = l.noRootDir || top == "kubelet"
	case top == "log":
		set(l, &l.Config.Log, logFields(), at, v)
	case top == "kubelet":
		l.noRootDir = !set(l, &l.Config.Kubelet, kubeletFields(), at, v) || l.noRootDir
	case len(at.path) == 2:
		return l.driver(at, isTable)
	default:
		t := l.drivers[at.path[1]]
		if !set(l, &t.Driver, l.fields, at, v) {
			l.faulty[t.Name] = true
		}
	}
	return false
}

// driver adds a driver's table and reports whether it is one.
func (l *loader) driver(at position, isTable bool) bool {
	name := at.path[1]
	if !isTable && slices.Contains(keys(l.fields), name) {
		l.Errors = append(l.Errors, at.error("is not a table", `it belongs in a table [driver."NAME"]`))
		return false
	}
	if l.drivers[name] == nil {
		t := &table{Driver: defaults(l.fields), first: at}
		t.Name = name
		l.drivers[name], l.tables = t, append(l.tables, t)
	}
	if !isTable {
		l.reject(name, at.error("is not a table", "must be a table: ["+at.id+"], in single brackets"))
	} else if err := csiname.CheckName(name); err != nil {
		l.reject(name, at.error("is "+err.Error(), "must be the name that the driver answers to GetPluginInfo"))
	}
	return isTable
}

// reject notes an error that leaves a driver out.
func (l *loader) reject(driver string, e Error) {
	l.Errors = append(l.Errors, e)
	l.faulty[driver] = true
}

// set sets the field of t and reports whether the value is valid.
func set[T any](l *loader, t *T, fields []field[T], at position, v any) bool {
	key := at.path[len(at.path)-1]
	i := slices.IndexFunc(fields, func(f field[T]) bool { return f.key == key })
	if i < 0 {
		hint := knownHere(keys(fields))
		if _, isTable := v.(map[string]any); isTable && at.path[0] == "driver" { // [driver.nfs.csi.k8s.io]
			hint = fmt.Sprintf("a name with dots must be in quotes: [driver.%s]", safetext.Quote(at.path[1]+"."+key+"…"))
		}
		l.Errors = append(l.Errors, at.error("is not known", hint))
		return false
	}
	if err := fields[i].set(t, v); err != nil {
		l.Errors = append(l.Errors, at.error(err.problem, cmp.Or(err.hint, fields[i].want)))
		return false
	}
	l.origins[at.id] = at
	return true
}
