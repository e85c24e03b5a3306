// Command sbom lists the contents of a Go binary, from the data of the linker: with
// "sbom spdx NAME FILE" as an SPDX 2.3 document, with "sbom licenses FILE" as the licenses
// of its modules, in full. The same binary and SOURCE_DATE_EPOCH give the same bytes.
//
// cyclonedx-gomod 1.10 was tried in its place. It gives the same bytes twice and the names of the
// modules' licenses, but neither their texts nor the sum of the program, which
// scripts/verify-release compares, and it downloads all modules each time.
package main

import (
	"cmp"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"
)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

func run(args []string, out io.Writer) error {
	switch {
	case len(args) == 3 && args[0] == "spdx":
		return spdx(args[1], args[2], out)
	case len(args) == 2 && args[0] == "licenses":
		return licenses(args[1], out)
	}
	return errors.New("usage: sbom spdx NAME FILE | sbom licenses FILE")
}

// document is the part of SPDX 2.3 that there is something to say for.
type document struct {
	SPDXVersion       string         `json:"spdxVersion"`
	DataLicense       string         `json:"dataLicense"`
	SPDXID            string         `json:"SPDXID"`
	Name              string         `json:"name"`
	DocumentNamespace string         `json:"documentNamespace"`
	CreationInfo      creation       `json:"creationInfo"`
	Packages          []pkg          `json:"packages"`
	Relationships     []relationship `json:"relationships"`
}

type creation struct {
	Created  string   `json:"created"`
	Creators []string `json:"creators"`
}

type pkg struct {
	SPDXID           string      `json:"SPDXID"`
	Name             string      `json:"name"`
	Version          string      `json:"versionInfo"`
	DownloadLocation string      `json:"downloadLocation"`
	FilesAnalyzed    bool        `json:"filesAnalyzed"`
	LicenseDeclared  string      `json:"licenseDeclared"`
	LicenseConcluded string      `json:"licenseConcluded"`
	Copyright        string      `json:"copyrightText"`
	Comment          string      `json:"comment,omitempty"`
	Checksums        []checksum  `json:"checksums,omitempty"`
	References       []reference `json:"externalRefs,omitempty"`
}

type checksum struct {
	Algorithm string `json:"algorithm"`
	Value     string `json:"checksumValue"`
}

type reference struct {
	Category string `json:"referenceCategory"`
	Type     string `json:"referenceType"`
	Locator  string `json:"referenceLocator"`
}

type relationship struct {
	From string `json:"spdxElementId"`
	Kind string `json:"relationshipType"`
	To   string `json:"relatedSpdxElement"`
}

func spdx(name, file string, out io.Writer) error {
	info, err := buildinfo.ReadFile(file)
	if err != nil {
		return fmt.Errorf("cannot read what %s was built from: %w", file, err)
	}
	seconds, err := strconv.ParseInt(os.Getenv("SOURCE_DATE_EPOCH"), 10, 64)
	if err != nil {
		return fmt.Errorf("cannot date the document: set SOURCE_DATE_EPOCH to a time in seconds: %w", err)
	}
	bytes, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	sum := fmt.Sprintf("%x", sha256.Sum256(bytes))
	version := os.Getenv("VERSION")
	main := pkg{
		SPDXID: "SPDXRef-binary", Name: name, Version: version,
		LicenseDeclared: "Apache-2.0",
		Comment:         settings(info),
		Checksums:       []checksum{{"SHA256", sum}},
		References:      purl("pkg:generic/" + name + "@" + version),
	}
	d := document{
		SPDXVersion: "SPDX-2.3", DataLicense: "CC0-1.0", SPDXID: "SPDXRef-DOCUMENT",
		Name:              name + " " + version,
		DocumentNamespace: "https://spdx.org/spdxdocs/" + name + "-" + version + "-" + sum,
		CreationInfo: creation{
			Created:  time.Unix(seconds, 0).UTC().Format(time.RFC3339),
			Creators: []string{"Tool: csi-registrar-scripts-sbom"},
		},
		Packages:      []pkg{main},
		Relationships: []relationship{{"SPDXRef-DOCUMENT", "DESCRIBES", main.SPDXID}},
	}
	goVersion, _, _ := strings.Cut(strings.TrimPrefix(info.GoVersion, "go"), " ")
	parts := []pkg{{
		SPDXID: "SPDXRef-module-stdlib", Name: "stdlib", Version: goVersion, LicenseDeclared: "BSD-3-Clause",
		References: purl("pkg:golang/stdlib@" + goVersion),
	}}
	for _, m := range modules(info) {
		parts = append(parts, pkg{
			SPDXID: "SPDXRef-module-" + notID.ReplaceAllString(m.Path, "-"), Name: m.Path, Version: m.Version,
			Comment:    "go.sum: " + m.Sum,
			References: purl("pkg:golang/" + m.Path + "@" + m.Version),
		})
	}
	for _, p := range parts {
		d.Relationships = append(d.Relationships, relationship{main.SPDXID, "CONTAINS", p.SPDXID})
	}
	d.Packages = append(d.Packages, parts...)
	for i := range d.Packages {
		p := &d.Packages[i]
		p.DownloadLocation, p.LicenseConcluded, p.Copyright = "NOASSERTION", "NOASSERTION", "NOASSERTION"
		p.LicenseDeclared = cmp.Or(p.LicenseDeclared, "NOASSERTION")
	}
	e := json.NewEncoder(out)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(d)
}

// notID is what may not stand in an SPDX identifier.
var notID = regexp.MustCompile(`[^A-Za-z0-9.-]+`)

func purl(locator string) []reference {
	return []reference{{"PACKAGE-MANAGER", "purl", locator}}
}

// modules lists what was linked in, beside the main module.
func modules(info *debug.BuildInfo) []debug.Module {
	var all []debug.Module
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		all = append(all, *m)
	}
	slices.SortFunc(all, func(a, b debug.Module) int { return cmp.Compare(a.Path, b.Path) })
	return all
}

// settings returns how the binary was built.
func settings(info *debug.BuildInfo) string {
	words := []string{info.GoVersion}
	for _, s := range info.Settings {
		if s.Key != "-ldflags" && !strings.HasPrefix(s.Key, "vcs") {
			words = append(words, s.Key+"="+s.Value)
		}
	}
	return strings.Join(words, " ")
}

func licenses(file string, out io.Writer) error {
	info, err := buildinfo.ReadFile(file)
	if err != nil {
		return fmt.Errorf("cannot read what %s was built from: %w", file, err)
	}
	root, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		return fmt.Errorf("cannot find Go's own license: %w", err)
	}
	if err := license("Go "+info.GoVersion, strings.TrimSpace(string(root)), out); err != nil {
		return err
	}
	for _, m := range modules(info) {
		found, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", m.Path).Output()
		if err != nil {
			return fmt.Errorf("cannot find the source of %s: %w", m.Path, err)
		}
		// go list has no directory for a module that is in vendor.
		dir := cmp.Or(strings.TrimSpace(string(found)), filepath.Join("vendor", m.Path))
		if err := license(m.Path+" "+m.Version, dir, out); err != nil {
			return err
		}
	}
	return nil
}

// license prints the files in which a module's license and notices are.
func license(name, dir string, out io.Writer) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	found := false
	for _, e := range entries {
		upper := strings.ToUpper(e.Name())
		isLicense := strings.HasPrefix(upper, "LICENSE") || strings.HasPrefix(upper, "COPYING")
		if e.IsDir() || !isLicense && !strings.HasPrefix(upper, "NOTICE") {
			continue
		}
		text, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return err
		}
		found = found || isLicense
		fmt.Fprintf(out, "==== %s: %s\n\n%s\n", name, e.Name(), strings.TrimRight(string(text), "\n")+"\n")
	}
	// Go as Debian packages it keeps it elsewhere; its license is that of its modules.
	if !found && !strings.HasPrefix(name, "Go ") {
		return fmt.Errorf("cannot find the license of %s in %s", name, dir)
	}
	return nil
}
