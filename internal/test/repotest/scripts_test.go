package repotest

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// tree copies the named files of the repository to a directory.
func tree(t *testing.T, files ...string) string {
	t.Helper()
	dir := t.TempDir()
	for _, file := range files {
		b, err := os.ReadFile(filepath.Join(top, file))
		if err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(dir, file), string(b))
	}
	return dir
}

// write writes a file that can be executed.
func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
}

// sh runs a shell script in dir and returns what it prints.
func sh(t *testing.T, dir, script string, env ...string) (string, error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "sh", "-euc", script)
	cmd.Dir = dir
	// Not the settings of the test's caller, and no repository around dir.
	cmd.Env = append(slices.DeleteFunc(os.Environ(), func(s string) bool {
		return strings.HasPrefix(s, "VERSION=") || strings.HasPrefix(s, "SOURCE_DATE_EPOCH=") || strings.HasPrefix(s, "GIT_")
	}), env...)
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

// TestVersion checks the versions of a release and of the commits after it.
func TestVersion(t *testing.T) {
	const released = "# Changelog\n\n## [0.3.0] - 2026-01-02\n\n- x\n\n## [0.2.0] - 2025-01-02\n"
	for changelog, want := range map[string]string{
		released: "0.3.0",
		strings.Replace(released, "## ", "## [Unreleased]\n\n- y\n\n## ", 1): "0.3.0+20260203040506",
	} {
		dir := tree(t, "scripts/version", "scripts/source-date")
		write(t, filepath.Join(dir, "CHANGELOG.md"), changelog)
		for _, where := range []string{"a tarball", "a clone"} {
			script := "TZ=UTC touch -d '2026-02-03 04:05:06' CHANGELOG.md; TZ=Asia/Tokyo scripts/version"
			if where == "a clone" {
				script = "git init -q; git -c user.name=x -c user.email=x@example.com commit -q --allow-empty -m x; " + script
			}
			got, err := sh(t, dir, script, "GIT_COMMITTER_DATE=2026-02-03T04:05:06Z")
			if err != nil || got != want {
				t.Errorf("%s: %s, %v, want %s", where, got, err, want)
			}
		}
	}
}

// TestVersionIsNamed checks that the files that name the version name that of CHANGELOG.md.
func TestVersionIsNamed(t *testing.T) {
	b, err := os.ReadFile(filepath.Join(top, "CHANGELOG.md"))
	if err != nil {
		t.Fatal(err)
	}
	newest := regexp.MustCompile(`(?m)^## \[(\d.*)\]`).FindStringSubmatch(string(b))
	if newest == nil {
		t.Fatal("CHANGELOG.md has no version")
	}
	for file, patterns := range map[string][]string{
		"README.md":                                     {`(?m)^(\S+) is the .*version`},
		"packaging/release-notes.md":                    {`^# csi-registrar (.*)`, `csi-registrar[_-](\d[\d.]*\d)`, ` v(\d\S*)`},
		"packaging/debian/changelog":                    {`^csi-registrar \((.*)-1\)`},
		"packaging/rpm/csi-registrar.spec":              {`(?m)^Version: (.*)`},
		"packaging/examples/cluster/Containerfile":      {`csi-registrar:(\S+)`},
		"packaging/examples/cluster/kustomization.yaml": {`newTag: (.*)`},
	} {
		b, err := os.ReadFile(filepath.Join(top, file))
		if err != nil {
			t.Fatal(err)
		}
		for _, pattern := range patterns {
			found := regexp.MustCompile(pattern).FindAllStringSubmatch(string(b), -1)
			if found == nil {
				t.Errorf("%s does not have %s", file, pattern)
			}
			for _, match := range found {
				if match[1] != newest[1] {
					t.Errorf("%s: %q names another version than %s, the newest of CHANGELOG.md", file, match[0], newest[1])
				}
			}
		}
	}
}

// TestCommit checks that a program is not built without its commit, or with another date, because
// git fails.
func TestCommit(t *testing.T) {
	dir := tree(t, "scripts/commit", "scripts/source-date")
	for _, script := range []string{"scripts/commit", "scripts/source-date"} {
		if out, err := sh(t, dir, "mkdir -p .git; "+script); err == nil {
			t.Errorf("%s in a repository that git cannot read: %q", script, out)
		}
	}
	// A repository around the tree is not its own.
	inner := filepath.Join(dir, "inner")
	script := `rmdir .git; git init -q; git -c user.name=x -c user.email=x@example.com commit -q --allow-empty -m x
		mkdir inner; mv scripts inner/; cd inner; touch -d @12345 CHANGELOG.md; echo "$(scripts/commit) $(scripts/source-date)"`
	if out, err := sh(t, dir, script); err != nil || out != "12345" {
		t.Errorf("in %s: %q, %v", inner, out, err)
	}
}

// TestPackages replaces Go and its programs by ones that do nothing.
func TestPackages(t *testing.T) {
	bin := t.TempDir()
	// The programs that this one builds fail if their first argument is $FAILS.
	write(t, filepath.Join(bin, "go"), `#!/bin/sh
while [ "$1" != -o ]; do shift; done
printf '#!/bin/sh\n[ "$1" != "$FAILS" ] || exit 1\necho text\n' >"$2"
chmod +x "$2"
`)
	env := []string{"PATH=" + bin + ":" + os.Getenv("PATH"), "DIST=" + t.TempDir(), "ARCHS=amd64", "FORMATS=deb", "COMMIT=", "VERSION=0.3.0", "SOURCE_DATE_EPOCH=1"}
	if out, err := sh(t, top, "scripts/packages csi-registrar", env...); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, fails := range []string{"spdx", "licenses", "package"} {
		if out, err := sh(t, top, "scripts/packages csi-registrar", append(env, "FAILS="+fails)...); err == nil {
			t.Errorf("a package although %s failed: %s", fails, out)
		}
	}

	// The commands of the README name what is in dist by a pattern.
	script := `cd "$DIST"; rm -f *; touch csi-registrar_0.2.0_amd64.deb csi-registrar-0.2.0-1.x86_64.rpm csi-registrar_0.2.0_amd64.spdx.json
		touch csi-registrar_0.3.0_arm64.deb csi-registrar-archive-keyring_0.2.0_all.deb csi-sample-driver_0.2.0_amd64.deb
		cd "$OLDPWD"; scripts/packages csi-registrar >/dev/null; ls "$DIST"`
	want := "SHA256SUMS\ncsi-registrar-archive-keyring_0.2.0_all.deb\ncsi-registrar_0.3.0_amd64.spdx.json\ncsi-registrar_0.3.0_arm64.deb\ncsi-sample-driver_0.2.0_amd64.deb"
	if out, err := sh(t, top, script, env...); err != nil || out != want {
		t.Errorf("%v: in dist are\n%s\nwant\n%s", err, out, want)
	}
}

// TestRepositoryAgain checks that a repository of which only the previous state is there is not
// begun anew.
func TestRepositoryAgain(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "repository")
	write(t, filepath.Join(dir+".old", "deb"), "x")
	out, err := sh(t, top, `scripts/repository "$DIR"`, "DIR="+dir, "KEY=x", "BASE_URL=https://example.com")
	if err == nil || !strings.Contains(out, "mv "+dir+".old "+dir) {
		t.Errorf("%v: %s", err, out)
	}
}

// TestStageAgain checks that `make install` keeps the administrator's configuration.
func TestStageAgain(t *testing.T) {
	dir := t.TempDir()
	script := `scripts/stage "$DIR" scripts/stage; echo x=1 >"$DIR/etc/csi-registrar/config.toml"
		scripts/stage "$DIR" scripts/stage; cat "$DIR/etc/csi-registrar/config.toml"`
	if out, err := sh(t, top, script, "DIR="+dir); err != nil || out != "x=1" {
		t.Errorf("%v: the configuration is %q", err, out)
	}
}

// TestPreinst checks that the deb can be installed into the root of an image without /run.
func TestPreinst(t *testing.T) {
	if out, err := sh(t, top, "sh packaging/debian/preinst install", "DPKG_ROOT="+t.TempDir()); err != nil || out != "" {
		t.Errorf("%v: %s", err, out)
	}
}

// TestCopyright checks that the copyright file of the source package has each module that is in
// the tarball.
func TestCopyright(t *testing.T) {
	b, err := os.ReadFile(filepath.Join(top, "packaging/debian/copyright"))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, match := range regexp.MustCompile(`vendor/(\S+)/\*`).FindAllStringSubmatch(string(b), -1) {
		got = append(got, match[1])
	}
	mod, err := os.ReadFile(filepath.Join(top, "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, match := range regexp.MustCompile(`(?m)^\t(\S+) v`).FindAllStringSubmatch(string(mod), -1) {
		want = append(want, match[1])
	}
	slices.Sort(got)
	slices.Sort(want)
	if len(want) == 0 || !slices.Equal(got, want) {
		t.Errorf("the copyright file has\n%q\nwant those of go.mod,\n%q", got, want)
	}
}
