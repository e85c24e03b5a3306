package config

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/BurntSushi/toml"

	"csi-registrar/internal/safetext"
	"csi-registrar/internal/status"
)

// Result is what the files say, and what is wrong with them.
type Result struct {
	// Config is what counts where there is no earlier configuration without errors. An
	// error in a driver's table leaves that driver out, one in [log] that value. Any other
	// leaves out all drivers that the part may be about (see loader.broken).
	Config *Config
	// Files are the files that were read, in the order in which they were applied.
	Files []string
	// Hidden are files that do not count because one of the same name, which may be
	// empty or a link to /dev/null, is in a place before theirs.
	Hidden []Hidden
	// Links are the drop-ins that are links, for whoever watches the files.
	Links []string
	// Errors of all files, in the order of the files, then of the lines.
	Errors Errors
	// Faulty names the drivers that are left out for an error, sorted. What can be no
	// driver's name is not among them.
	Faulty []string

	origins map[string]position // of each value that is in force
}

// Origin says where the value of a key is, such as driver."nfs.csi.k8s.io".timeout:
// "FILE:LINE", or "default" if no file has it.
func (r *Result) Origin(key string) string {
	if at, written := r.origins[key]; written {
		return at.String()
	}
	return "default"
}

// Load reads the files. It never fails as a whole: what cannot be read is an error in the
// Result. It may block for as long as a file system does not answer.
func Load(s Source) *Result {
	rule, l := s.rule(), newLoader()
	files := s.list(rule, &l.Result)
	l.allHeldBack = len(l.Errors) > 0 // nobody knows what was in there
	for _, f := range files {
		l.rank[f.path] = f.rank
		text, bad := read(rule, f.path)
		switch {
		case bad != nil:
			l.broken(f, text, *bad)
		case text != "": // nothing in it: it only hides others
			l.Files = append(l.Files, f.path)
			l.apply(f, text)
		}
	}
	return l.result()
}

// position is where a key is written.
type position struct {
	file  file
	doc   *document
	path  []string // of the key
	id    string   // path as TOML writes it
	whole toml.Key // the first key in the file that begins with path
	order int      // of whole among the keys of the file
}

func (p position) String() string { return place(p.file.path, p.doc.line(p.whole)) }

// error makes an error about the key.
func (p position) error(problem, hint string) Error {
	return Error{p.file.path, p.doc.line(p.whole), p.id, problem, hint}
}

// loader merges files, one after the other.
type loader struct {
	Result
	drivers map[string]*table
	rank    map[string]int // of each file, also one that cannot be read

	faulty      map[string]bool // drivers that are left out
	allHeldBack bool            // all are
	suspect     []string        // texts: a driver that one of them mentions is left out
}

// table is a driver's table as far as it is known.
type table struct {
	Driver
	first position // where it is named first
}

func newLoader() *loader {
	return &loader{
		Result:  Result{Config: Default(), origins: make(map[string]position)},
		drivers: make(map[string]*table),
		rank:    make(map[string]int),
		faulty:  make(map[string]bool),
	}
}

// broken notes an error of which nobody can tell what else the file was to say. A drop-in
// may have changed what other files say of each driver that its text mentions; one whose
// text is not known may have changed everything, and so may the main file.
func (l *loader) broken(f file, text string, e Error) {
	e.File = cmp.Or(e.File, f.path)
	l.Errors = append(l.Errors, e)
	// A character of a name can be written as an escape.
	if !f.dropIn || text == "" || !utf8.ValidString(text) || strings.ContainsAny(text, "\\\x00") {
		l.allHeldBack = true
	}
	l.suspect = append(l.suspect, text)
}

// heldBack reports whether a driver is left out for an error.
func (l *loader) heldBack(name string) bool {
	return l.allHeldBack || l.faulty[name] ||
		slices.ContainsFunc(l.suspect, func(text string) bool { return strings.Contains(text, name) })
}

// apply puts what a file says over what was said before it. Each value is validated where
// it is, also one that a later file overrides.
func (l *loader) apply(f file, text string) {
	doc, bad := parse(text)
	if bad != nil {
		l.broken(f, text, *bad)
		return
	}
	isTable := make(map[string]bool) // the keys that were read: whether what is below them counts
	for i, key := range doc.md.Keys() {
		var v any = doc.tree
		for n := range min(len(key), 3) {
			v = v.(map[string]any)[key[n]]
			at := position{f, doc, key[:n+1], keyString(key[:n+1]...), key, i}
			if _, known := isTable[at.id]; !known {
				isTable[at.id] = l.read(at, v)
			}
			if !isTable[at.id] {
				break
			}
		}
	}
}

// read reads a key and reports whether it is a table of which the keys count.
func (l *loader) read(at position, v any) bool {
	_, isTable := v.(map[string]any)
	known := []string{"kubelet", "log", "driver"}
	switch top := at.path[0]; {
	case !slices.Contains(known, top):
		l.broken(at.file, at.doc.text, at.error("is not known", knownHere(known)))
		return false
	case len(at.path) == 1 && isTable:
		return true
	case len(at.path) == 1 && top == "driver":
		l.broken(at.file, at.doc.text, at.error("is not a table", `must be tables [driver."NAME"]`))
	case len(at.path) == 1:
		l.Errors = append(l.Errors, at.error("is not a table", "must be the table ["+top+"]"))
		l.allHeldBack = l.allHeldBack || top == "kubelet"
	case top == "log":
		set(l, &l.Config.Log, logFields(), at, v)
	case top == "kubelet":
		// With a wrong root_dir nobody knows where to publish.
		l.allHeldBack = !set(l, &l.Config.Kubelet, kubeletFields(), at, v) || l.allHeldBack
	case len(at.path) == 2:
		return l.driver(at, isTable)
	default:
		t := l.drivers[at.path[1]]
		if !set(l, &t.Driver, driverFields(), at, v) {
			l.faulty[t.Name] = true
		}
	}
	return false
}

// driver begins a driver's table, and reports whether it is one.
func (l *loader) driver(at position, isTable bool) bool {
	name := at.path[1]
	if !isTable && slices.Contains(keys(driverFields()), name) {
		l.broken(at.file, at.doc.text, at.error("is not a table", `it belongs in a table [driver."NAME"]`))
		return false
	}
	if l.drivers[name] == nil {
		l.drivers[name] = &table{Driver: DefaultDriver(name, ""), first: at}
	}
	if !isTable {
		l.spoil(name, at.error("is not a table", "must be a table: ["+at.id+"], in single brackets"))
	} else if err := status.CheckName(name); err != nil {
		l.spoil(name, at.error("is "+err.Error(), "must be the name that the driver answers to GetPluginInfo"))
	}
	return isTable
}

// spoil notes an error that leaves a driver out.
func (l *loader) spoil(driver string, e Error) {
	l.Errors = append(l.Errors, e)
	l.faulty[driver] = true
}

// set puts a value into its place in t and reports whether it is right.
func set[T any](l *loader, t *T, fields []field[T], at position, v any) bool {
	key := at.path[len(at.path)-1]
	i := slices.IndexFunc(fields, func(f field[T]) bool { return f.key == key })
	if i < 0 {
		if _, isTable := v.(map[string]any); isTable && at.path[0] == "driver" {
			// [driver.nfs.csi.k8s.io]: it is about the driver whose name was meant.
			l.broken(at.file, at.doc.text, at.error("is not known",
				fmt.Sprintf("a name with dots must be in quotes: [driver.%s]", safetext.Quote(at.path[1]+"."+key+"…"))))
		} else {
			l.Errors = append(l.Errors, at.error("is not known", knownHere(keys(fields))))
		}
		return false
	}
	if bad := fields[i].set(t, v); bad != nil {
		l.Errors = append(l.Errors, at.error(bad.problem, cmp.Or(bad.hint, fields[i].want)))
		return false
	}
	l.origins[at.id] = at
	return true
}
