package repotest

import (
	"context"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/core/control"
	"csi-registrar/internal/node/status"
)

// entries returns the tags of the paragraphs of a section of csi-registrar-json(5), in their order,
// and the paragraphs by tag.
func entries(t *testing.T, heading string) (tags []string, text map[string]string) {
	t.Helper()
	page := unroff(t, "csi-registrar-json.5")
	_, body, found := strings.Cut(page, heading+"\n")
	if !found {
		t.Errorf("csi-registrar-json.5 has no section %q", heading)
		return nil, nil
	}
	body = regexp.MustCompile(`(?m)^\.S[HS] `).Split(body, 2)[0]
	text = map[string]string{}
	for _, entry := range regexp.MustCompile(`(?m)^\.TP.*\n`).Split(body, -1)[1:] {
		tag, rest, _ := strings.Cut(strings.TrimPrefix(entry, ".B "), "\n")
		tags, text[tag] = append(tags, tag), rest
	}
	return tags, text
}

// TestManDocuments checks that csi-registrar-json(5) has each field of each document, and says of
// optional fields when they are absent. It finds structs by their json tags, so that none is
// forgotten.
func TestManDocuments(t *testing.T) {
	sections := map[string]string{
		"status.Document":   ".SH STATUS",
		"status.Driver":     ".SS Elements of drivers",
		"status.Volumes":    ".SS Object volumes",
		"status.ServedBy":   ".SS Object served_by",
		"status.Server":     ".SS Object server",
		"status.Kubelet":    ".SS Object kubelet",
		"status.StuckCall":  ".SS Elements of stuck",
		"status.Withdrawal": ".SS Elements of withdrawals",
		"doctor.Report":     ".SH DOCTOR",
		"doctor.Finding":    ".SS Elements of findings",
		"doctor.Check":      ".SS Elements of checks",
		"trace.Call":        ".SH TRACE",
		"cli.buildInfo":     ".SH VERSION",
		"cli.buildModule":   ".SS Elements of modules",
		"control.failure":   ".SS Body of a failure under /v1",
		"control.reloaded":  ".SS Body of the answer to a reload",

		// Only in the daemon's own records.
		"status.Identity": "", "status.Announcement": "", "status.Notification": "", "status.Publication": "",
	}
	seen := map[string]bool{}
	for _, name := range []string{"node/status", "tool/doctor", "tool/trace", "cli", "core/control"} {
		for typ, fields := range jsonFields(t, name) {
			heading, ok := sections[typ]
			if !ok {
				t.Errorf("%s has json tags: describe its fields in csi-registrar-json.5, and name the section here", typ)
				continue
			}
			seen[typ] = true
			if heading == "" {
				continue
			}
			tags, text := entries(t, heading)
			var want []string
			for _, f := range fields {
				field, options, _ := strings.Cut(f, ",")
				want = append(want, field)
				if says := strings.Contains(text[field], "Absent "); text[field] != "" && says != (options != "") {
					t.Errorf("csi-registrar-json.5, %q: that %s can be absent is %t, the page says %t", heading, field, options != "", says)
				}
			}
			if !slices.Equal(tags, want) {
				t.Errorf("csi-registrar-json.5, %q: it has the fields\n%q, %s has\n%q", heading, tags, typ, want)
			}
		}
	}
	for typ := range sections {
		if !seen[typ] {
			t.Errorf("there is no %s any more", typ)
		}
	}
}

// jsonFields returns the json tags of the structs of a package, in their order.
func jsonFields(t *testing.T, name string) map[string][]string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("..", "..", name, "*.go"))
	if err != nil || len(files) == 0 {
		t.Fatalf("cannot find package %s: %v", name, err)
	}
	out := map[string][]string{}
	for _, path := range files {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			spec, ok := n.(*ast.TypeSpec)
			if !ok {
				return true
			}
			structure, ok := spec.Type.(*ast.StructType)
			if !ok {
				return true
			}
			typ := filepath.Base(name) + "." + spec.Name.Name
			var bare []string // fields without a tag are also in the document
			for _, f := range structure.Fields.List {
				tag := ""
				if f.Tag != nil {
					text, err := strconv.Unquote(f.Tag.Value)
					if err != nil {
						t.Fatal(err)
					}
					tag = reflect.StructTag(text).Get("json")
				}
				for _, id := range f.Names {
					if tag == "" && id.IsExported() {
						bare = append(bare, id.Name)
					}
				}
				if tag != "" && tag != "-" {
					out[typ] = append(out[typ], tag)
				}
			}
			if out[typ] != nil {
				out[typ] = append(out[typ], bare...)
			}
			return true
		})
	}
	return out
}

// source returns a source file of another package.
func source(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", "..", path))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// firsts returns the first groups of all matches.
func firsts(pattern, s string) []string {
	var out []string
	for _, m := range regexp.MustCompile(pattern).FindAllStringSubmatch(s, -1) {
		out = append(out, m[1])
	}
	return out
}

// TestManResults checks that the page has all results of doctor's steps.
func TestManResults(t *testing.T) {
	_, text := entries(t, ".SS Elements of checks")
	words := firsts(`(?m)^\s+\w+ +Result += +"(.*?)"`, source(t, "tool/doctor/report.go"))
	if len(words) < 4 {
		t.Fatal("cannot find the results")
	}
	for _, word := range words {
		if !regexp.MustCompile(`(^|[ ,])` + word + `([,;.:]|$)`).MatchString(text["result"]) {
			t.Errorf("csi-registrar-json.5 does not name the result %q", word)
		}
	}
}

// TestManRoutes compares the HTTP API in the page with that of package control.
func TestManRoutes(t *testing.T) {
	want := firsts(`mux\.Handle(?:Func)?\("([^"]+)"`, source(t, "core/control/handler.go"))
	got, _ := entries(t, ".SH HTTP API")
	slices.Sort(want)
	want = slices.Compact(want) // the public part has its own handlers
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("csi-registrar-json.5 has the routes\n%q, package control\n%q", got, want)
	}
}

// backend is a daemon with one driver.
type backend struct{ driver status.Driver }

func (b backend) Status() status.Document {
	return status.Document{
		Version: "1.2.3", StartedAt: b.driver.Since, Kubelet: status.Kubelet{ConfirmedAt: b.driver.Since}, NodeVolumes: new(status.NodeVolumes), Drivers: []status.Driver{b.driver},
	}
}
func (backend) Changed() <-chan struct{}                       { return nil }
func (backend) Reload(context.Context, bool) ([]string, error) { return nil, nil }
func (backend) Reregister(context.Context, string, bool) error { return nil }
func (backend) Alive(context.Context) error                    { return nil }
func (backend) Live(context.Context, string) error             { return nil }

// TestManMetrics compares the metrics in the page, with their labels, types and label values, with
// those that the daemon serves.
func TestManMetrics(t *testing.T) {
	now := time.Now()
	d := status.Driver{
		Name: "a.example", State: string(status.Registered), Driver: status.Ready, Registration: status.Registered,
		Since: now, RegisteredAt: now, LastGetInfoAt: now, Took: time.Second, NotKept: "full", Republications: 1,
	}
	rec := httptest.NewRecorder()
	control.PublicHandler(backend{d}).ServeHTTP(rec, httptest.NewRequest("GET", "/metrics", nil))
	served := rec.Body.String()

	tags, text := entries(t, ".SH METRICS")
	var want []string
	for _, m := range regexp.MustCompile(`# TYPE (\S+) (\S+)\n\S+?(\{.*\})? \S+\n`).FindAllStringSubmatch(served, -1) {
		tag := m[1]
		if labels := firsts(`[{,](\w+)="`, m[3]); labels != nil {
			tag += "{" + strings.Join(labels, ",") + "}"
		}
		want = append(want, tag)
		if kind, _, _ := strings.Cut(strings.ToLower(text[tag]), "."); kind != m[2] {
			t.Errorf("csi-registrar-json.5: %s is a %s, the page says %q", tag, m[2], kind)
		}
		for _, word := range firsts(m[1]+`\{driver="[^"]*",\w+="([^"]+)"`, served) {
			if !regexp.MustCompile(`[ (]` + word + `[ ,.)]`).MatchString(text[tag]) {
				t.Errorf("csi-registrar-json.5: %s can have the label %q, which the page does not name", tag, word)
			}
		}
	}
	if !slices.Equal(tags, want) {
		t.Errorf("csi-registrar-json.5 has the metrics\n%q, the daemon serves\n%q", tags, want)
	}
	state := text["csi_registrar_driver_state{driver,state}"]
	for _, word := range []any{
		status.Disabled, status.Invalid, status.Absent, status.Starting, status.Ready, status.Hanging, status.Mismatch,
		status.Published, status.Registered, status.Refused, status.Conflict,
	} {
		if !strings.Contains(state, fmt.Sprintf(" %s", word)) {
			t.Errorf("csi-registrar-json.5: csi_registrar_driver_state can have the state %s, which the page does not name", word)
		}
	}
	// A family without samples is not served, so this driver must have samples of all.
	code := source(t, "core/control/metrics.go")
	if n := strings.Count(code, `e.family("`); n != len(want) {
		t.Errorf("there are %d metrics, the driver of this test has %d", n, len(want))
	}
}

// TestManStates compares the table in csi-registrar(1) with status.State.
func TestManStates(t *testing.T) {
	_, body, _ := strings.Cut(unroff(t, "csi-registrar.1"), "\n.SH STATES\n")
	_, table, _ := strings.Cut(body, "\n.nf\n")
	table, _, _ = strings.Cut(table, "\n.fi\n")
	rows := strings.Split(table, "\n")
	want := [][]string{{}}
	drivers := []status.DriverState{status.Absent, status.Starting, status.Ready, status.Hanging, status.Mismatch}
	for _, d := range drivers {
		want[0] = append(want[0], string(d))
	}
	for _, r := range []status.RegistrationState{status.None, status.Published, status.Registered, status.Refused, status.Conflict} {
		row := []string{string(r)}
		for _, d := range drivers {
			row = append(row, status.State(d, r))
		}
		want = append(want, row)
	}
	var got [][]string
	for _, row := range rows {
		got = append(got, strings.Fields(row))
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("csi-registrar.1 has the states\n%q, want\n%q", got, want)
	}
}

// TestIndex checks that packaging/doc/README.md links to every page and names every manual page.
func TestIndex(t *testing.T) {
	index, err := os.ReadFile(filepath.Join(top, "packaging/doc/README.md"))
	if err != nil {
		t.Fatal(err)
	}
	pages, err := filepath.Glob(filepath.Join(top, "packaging/doc/*.md"))
	manuals, manErr := filepath.Glob(filepath.Join(top, "packaging/man/*.[158]"))
	if err != nil || manErr != nil || len(pages) < 10 || len(manuals) < 4 {
		t.Fatalf("cannot find the pages: %q, %q", pages, manuals)
	}
	for _, page := range slices.Concat(pages, manuals) {
		name, want := filepath.Base(page), ""
		switch extension := filepath.Ext(name); {
		case name == "README.md":
			continue
		case extension == ".md":
			want = "](" + name + ")"
		default:
			want = strings.TrimSuffix(name, extension) + "(" + extension[1:] + ")"
		}
		if !strings.Contains(string(index), want) {
			t.Errorf("packaging/doc/README.md has no %s", want)
		}
	}
}

// hasHeading reports whether a page has a heading of which GitHub makes this anchor.
func hasHeading(t *testing.T, page, anchor string) bool {
	b, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	other := regexp.MustCompile(`[^\w\- ]`)
	return slices.ContainsFunc(firsts(`(?m)^#+ (.+)$`, string(b)), func(heading string) bool {
		return strings.ReplaceAll(other.ReplaceAllString(strings.ToLower(heading), ""), " ", "-") == anchor
	})
}

// TestLinks checks that no link is dead, in the source and as installed, and that every manual page
// of csi-registrar that a page refers to exists.
func TestLinks(t *testing.T) {
	installed := t.TempDir()
	binary := filepath.Join(t.TempDir(), "binary")
	if err := os.WriteFile(binary, nil, 0o755); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), filepath.Join(top, "scripts", "stage"), installed, binary).CombinedOutput(); err != nil {
		t.Fatalf("scripts/stage: %v\n%s", err, out)
	}
	links := 0
	for _, pattern := range []string{
		filepath.Join(top, "*.md"), filepath.Join(top, "packaging/doc/*.md"),
		filepath.Join(installed, "usr/share/doc/csi-registrar/*.md"),
	} {
		pages, err := filepath.Glob(pattern)
		if err != nil || len(pages) == 0 {
			t.Fatalf("there is no page %s: %v", pattern, err)
		}
		for _, page := range pages {
			b, err := os.ReadFile(page)
			if err != nil {
				t.Fatal(err)
			}
			for _, link := range firsts(`\]\(([^)\s]+)\)`, string(b)) {
				if strings.Contains(link, "://") || strings.HasPrefix(link, "mailto:") {
					continue
				}
				links++
				link, heading, _ := strings.Cut(link, "#")
				target := page
				if link != "" {
					target = filepath.Join(filepath.Dir(page), link)
				}
				if _, err := os.Stat(target); err != nil {
					t.Errorf("%s has a dead link: %v", page, err)
				} else if heading != "" && !hasHeading(t, target, heading) {
					t.Errorf("%s has a link to a heading that %s has not: %s", page, filepath.Base(target), heading)
				}
			}
		}
	}
	if links < 5 {
		t.Errorf("there are only %d links: this test cannot read the pages", links)
	}
	pages, err := filepath.Glob(filepath.Join(top, "packaging/man/*.[158]"))
	if err != nil {
		t.Fatal(err)
	}
	for _, page := range pages {
		for _, m := range regexp.MustCompile(`\.BR (csi-registrar\S*) \((\d)\)`).FindAllStringSubmatch(unroff(t, filepath.Base(page)), -1) {
			if _, err := os.Stat(filepath.Join(installed, "usr/share/man/man"+m[2], m[1]+"."+m[2]+".gz")); err != nil {
				t.Errorf("%s refers to %s(%s): %v", page, m[1], m[2], err)
			}
		}
	}
}
