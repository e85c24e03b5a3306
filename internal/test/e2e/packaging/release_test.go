package packaging

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"csi-registrar/internal/test/e2e/system/nspawn"
)

// maker can make releases: it has the source, with a tag, and the keys.
type maker struct {
	t       *testing.T
	dir     string
	version string
	env     []string
}

// newMaker puts this tree into a repository of its own, with the tag of its version.
func newMaker(t *testing.T) *maker {
	t.Helper()
	nspawn.Root(t, "trixie") // skips without root on Debian
	m := &maker{t: t, dir: t.TempDir()}
	gnupg, err := newKey("")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { endKey(gnupg); os.RemoveAll(gnupg) })
	cache, err := exec.Command("go", "env", "GOCACHE").Output()
	if err != nil {
		t.Fatal(err)
	}
	m.env = append(os.Environ(), "GNUPGHOME="+gnupg, "KEY="+keyOwner, "SIGNING_KEY="+m.dir+"/ssh", "GOCACHE="+strings.TrimSpace(string(cache)))
	copySource(t, m.dir)
	m.run(`ssh-keygen -q -t ed25519 -N '' -f ssh; ssh-keygen -q -t ed25519 -N '' -f other
		cd source; git tag "v$(scripts/version)"; git tag v9.9.9`)
	m.version = strings.TrimSpace(m.run("source/scripts/version"))
	return m
}

// run runs a script in the directory of the maker, with arguments from $1.
func (m *maker) run(script string, args ...string) string {
	m.t.Helper()
	out, err := m.try(script, args...)
	if err != nil {
		m.t.Fatalf("%s: %v\n%s", script, err, out)
	}
	return out
}

func (m *maker) try(script string, args ...string) (string, error) {
	cmd := exec.Command("sh", append([]string{"-euc", script, "sh"}, args...)...)
	cmd.Dir, cmd.Env = m.dir, m.env
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// functions are shell functions for the scripts below. They sign with the key $1.
const functions = `resign() {
	rm SHA256SUMS SHA256SUMS.sig
	LC_ALL=C sha256sum -- * >SHA256SUMS
	ssh-keygen -q -Y sign -n file -f "../$1" SHA256SUMS
}
sign_for() {
	rm SHA256SUMS.sig
	ssh-keygen -q -Y sign -n "$1" -f ../ssh SHA256SUMS
}
# The files are links of those of all tests: these are to be written to.
own() {
	for file; do cp "$file" ../own; mv ../own "$file"; done
}
# rebuild SCRIPT: csi-registrar's deb again, after SCRIPT in the directory of its files.
rebuild() {
	f=$(ls csi-registrar_*.deb)
	dpkg-deb -R "$f" ../x
	(cd ../x && eval "$1")
	rm "$f"
	dpkg-deb -Znone -b ../x "$f"
}
sbom() {
	f=$(ls csi-registrar_*.spdx.json)
	jq "$@" "$f" >../sbom
	mv ../sbom "$f"
}
# program VERSION COMMIT MODULES: the deb has a program that says this, and has the right commit; so has the SBOM.
program() {
	printf '#!/bin/sh\n# %s\necho '"'"'{"version": "%s", "commit": "%s", "modules": %s}'"'\n'" "$commit" "$@" >../program
	rebuild 'cat ../program >usr/bin/csi-registrar'
	sbom --arg sum "$(sha256sum <../program | cut -d ' ' -f 1)" '.packages[0].checksums |= map(if .algorithm == "SHA256" then .checksumValue = $sum else . end)'
	resign ssh
}
version=$(sed -n s/^version=//p RELEASE) commit=$(sed -n s/^commit=//p RELEASE)
signer() { echo "csi-registrar namespaces=\"file\" $(cut -d ' ' -f 1,2 "../$1.pub")"; }
ours=$(signer ssh) theirs=$(cut -d ' ' -f 1,2 ../other.pub)
# hide CONTENTS: of allowed_signers, without a newline at the end; the release is signed with the other key.
hide() {
	printf %b "$1" >../signers
	mv ../signers allowed_signers
	resign other
}
`

// change is a change of a release, a shell script in its directory, and the resulting error of
// verify-release; "" is any error.
type change struct{ script, says string }

// eachFile has the changes of one file, $f, or of $f and $next, and the reason, in which FILE
// stands for the name. Those of the files of the signature have other reasons.
var eachFile = map[string]change{
	"one byte changed": {`own "$f"; at=$(($(stat -c %s "$f") / 2)); byte=$(od -An -tu1 -j $at -N 1 "$f")
		printf "\\$(printf %o $((byte ^ 1)))" | dd of="$f" bs=1 seek=$at conv=notrunc status=none`, "FILE: FAILED"},
	"one byte more":     {`own "$f"; echo >>"$f"`, "FILE: FAILED"},
	"one byte less":     {`own "$f"; truncate -s -1 "$f"`, "FILE: FAILED"},
	"empty":             {`rm "$f"; : >"$f"`, "FILE: FAILED"},
	"removed":           {`rm "$f"`, "lists other files"},
	"swapped with next": {`mv "$f" ../swap; mv "$next" "$f"; mv ../swap "$next"`, "FILE: FAILED"},
}

// changesOfAll has the others: in SHA256SUMS, in the other files, and in incorrect contents that
// the owner of the key has signed.
var changesOfAll = map[string]change{
	"an extra file":            {": >extra", "lists other files"},
	"an extra hidden file":     {": >.extra", "not a file of a release"},
	"an extra directory":       {"mkdir extra", "not a file of a release"},
	"an extra link":            {"ln -s RELEASE extra", "not a file of a release"},
	"a link for a file":        {"mv RELEASE ../moved; ln -s ../moved RELEASE", "not a file of a release"},
	"a pipe for a file":        {"rm RELEASE; mkfifo RELEASE", "not a file of a release"},
	"a name that echo expands": {`mv RELEASE 'x\ny'`, "x?ny"},
	"a file that is too large": {"rm RELEASE; truncate -s 10T RELEASE", "not a file of a release"},
	// What is verified is a copy.
	"files that are removed meanwhile": {`mkdir ../bin; printf '#!/bin/sh\nrm -f "%s"/*.deb\nexec "%s" "$@"\n' "$PWD" "$(command -v rpmkeys)" >../bin/rpmkeys
		chmod +x ../bin/rpmkeys`, "intact"},
	"a name for the terminal":    {`mv RELEASE "$(printf 'x\033[2K\ry')"`, "x?[2K?y"},
	"a name with a newline":      {"mv RELEASE \"$(printf 'RELEASE\\nx')\"", "not a file of a release"},
	"a line edited":              {"sed -i 1s/^./x/ SHA256SUMS", "signature of SHA256SUMS"},
	"a line and file removed":    {"rm RELEASE; sed -i /RELEASE/d SHA256SUMS", "signature of SHA256SUMS"},
	"a line and file added":      {": >extra; own SHA256SUMS; sha256sum extra >>SHA256SUMS", "signature of SHA256SUMS"},
	"another order":              {"sort -r SHA256SUMS >../sums; mv ../sums SHA256SUMS", "signature of SHA256SUMS"},
	"a file and its line edited": {"own RELEASE; echo >>RELEASE; sha256sum -- * >../sums; mv ../sums SHA256SUMS", "signature of SHA256SUMS"},
	"signed by another key":      {"resign other", "signature of SHA256SUMS"},
	"signed by another key, which takes the place of the first": {"rm allowed_signers; signer other >allowed_signers; resign other", "signed by SHA256:"},
	"signed by another key, which is added":                     {"own allowed_signers; signer other >>allowed_signers; resign other", "must have one key"},
	// ssh-keygen -Y verify accepts these lines; ssh-keygen -l leaves them out, and wc does not
	// count them.
	"a key behind a tab":      {`hide "$ours\ncsi-registrar\tnamespaces=\"file\" $theirs"`, "must have one key"},
	"a key behind two spaces": {`hide "$ours\ncsi-registrar  namespaces=\"file\" $theirs"`, "must have one key"},
	"a tab before a key":      {`hide "$ours\ncsi-registrar namespaces=\"file\"\t$theirs"`, "must have one key"},
	"a key for everybody":     {`hide "$ours\n* $theirs"`, "must have one key"},
	"a key before ours":       {`hide "csi-registrar\tnamespaces=\"file\" $theirs\n$ours"`, "must have one key"},
	"the signature of another release": {`cp SHA256SUMS ../theirs; echo >>../theirs; ssh-keygen -q -Y sign -n file -f ../ssh ../theirs
		rm SHA256SUMS.sig; mv ../theirs.sig SHA256SUMS.sig`, "signature of SHA256SUMS"},
	"signed for another purpose": {"sign_for other", "signature of SHA256SUMS"},
	"no key":                     {"rm allowed_signers; echo key >allowed_signers", "must have one key"},
	"a broken key":               {`rm allowed_signers; echo 'csi-registrar namespaces="file" ssh-ed25519 AAAA' >allowed_signers`, "there is no key in allowed_signers"},

	"a line removed":           {"own SHA256SUMS; sed -i /RELEASE/d SHA256SUMS; sign_for file", "lists other files"},
	"a line twice":             {"own SHA256SUMS; sed -n 1p SHA256SUMS >>SHA256SUMS; sign_for file", "lists other files"},
	"a line of another form":   {"own SHA256SUMS; echo '# nothing' >>SHA256SUMS; sign_for file", "wrong line"},
	"another version":          {"sed -i s/=v*[0-9.]*$/9.9.9/ RELEASE; resign ssh", "RELEASE has"},
	"no commit":                {"sed -i s/^commit=.*/commit=/ RELEASE; resign ssh", "RELEASE has no commit"},
	"another commit":           {`sed -i "s/^commit=.*/commit=$(sha1sum <RELEASE | cut -d ' ' -f 1)/" RELEASE; resign ssh`, "tar.gz is not of commit"},
	"another tag":              {"sed -i s/^tag=.*/tag=v9.9.9/ RELEASE; resign ssh", "RELEASE has"},
	"an rpm without signature": {"own *.rpm; rpmsign --delsign csi-registrar-*.rpm; resign ssh", "NOT OK"},
	"an rpm of another key": {`own *.rpm; export GNUPGHOME="$(realpath ..)/gpg"; mkdir -m 700 "$GNUPGHOME"
		gpg -q --batch --passphrase '' --quick-gen-key x rsa2048 sign
		rpmsign --delsign *.rpm; ../source/scripts/sign-rpm x *.rpm; gpgconf --kill gpg-agent; resign ssh`, "NOT OK"},
	"no key of the rpms": {"rm csi-registrar-archive-keyring.asc; echo key >csi-registrar-archive-keyring.asc; resign ssh", "csi-registrar-archive-keyring.asc has no key"},

	"an SBOM cut off":         {"sed -i '$d' csi-registrar_*.spdx.json; resign ssh", "is not an SBOM"},
	"an SBOM without modules": {"sbom '.packages |= .[:1]'; resign ssh", "is not an SBOM"},
	"an SBOM of another form": {`sbom '.spdxVersion = "SPDX-3.0"'; resign ssh`, "is not an SBOM"},
	"an SBOM of a version":    {`sbom '.packages[0].versionInfo = "9.9.9"'; resign ssh`, "is not an SBOM"},
	"an SBOM of another":      {"mv csi-sample-driver_*.spdx.json csi-registrar_*.spdx.json; resign ssh", "is not that of"},
	"no SBOM":                 {"rm csi-registrar_*.spdx.json; resign ssh", "has no SBOM"},
	"an SBOM of no package":   {"cp csi-registrar_*.spdx.json x.spdx.json; resign ssh", "is of no package"},

	"a deb under another version's name": {"rebuild 's=$(sed s/^Version:.*/Version:9.9.9/ DEBIAN/control); echo \"$s\" >DEBIAN/control'; resign ssh", "is csi-registrar_9.9.9_"},
	"a deb of another version":           {"rebuild 's=$(sed s/^Version:.*/Version:9.9.9/ DEBIAN/control); echo \"$s\" >DEBIAN/control'; mv \"$f\" \"csi-registrar_9.9.9_${f##*_}\"; resign ssh", "is version 9.9.9"},
	"another program in a deb":           {"rebuild 'echo >>usr/bin/csi-registrar'; resign ssh", "the program in csi-registrar_"},
	"another program in an rpm": {`f=$(ls csi-registrar-*.rpm); rm "$f"; echo >../program
		printf '%s\n' 'name: csi-registrar' "arch: $(dpkg --print-architecture)" "version: $version" 'release: "1"' 'contents:' "- {src: $(realpath ../program), dst: /usr/bin/csi-registrar}" >../nfpm.yaml
		(cd "$(realpath ../source)"; go tool -modfile=scripts/tools.mod nfpm package --config "$OLDPWD/../nfpm.yaml" --packager rpm --target "$OLDPWD/$f")
		../source/scripts/sign-rpm "$KEY" "$f"; resign ssh`, "the program in csi-registrar-"},
	"another program in the system extension": {`f=$(ls *.raw); unsquashfs -q -n -d ../x $f; echo >>../x/usr/bin/csi-registrar
		rm $f; mksquashfs ../x $f -quiet -no-progress; resign ssh`, "the program in csi-registrar_"},
	"no system extension":             {"rm *.raw; resign ssh", "there is no *.raw"},
	"a system extension that is none": {`f=$(ls *.raw); rm "$f"; echo >"$f"; resign ssh`, "SQUASHFS superblock"},
	"a program without the commit":    {"commit=; program \"$version\" 0 '[1]'", "does not have commit"},
	"a program of another commit":     {"program \"$version\" 0 '[1]'", "does not say that it is"},
	"a program of another version":    {"program 9.9.9 \"$commit\" '[1]'", "does not say that it is"},
	"a program without modules":       {"program \"$version\" \"$commit\" '[]'", "does not say that it is"},

	"nothing": {":", "intact"},
}

// TestRelease makes a release of this tree, which builds everything twice and compares the results.
// The release is accepted unchanged, and refused with any of many changes.
func TestRelease(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	if out, err := m.try("source/scripts/release v9.9.9 x"); err == nil || !strings.Contains(out, "v9.9.9 is not version "+m.version) {
		t.Errorf("the release of a tag that is another version: %v\n%s", err, out)
	}
	// Suite check compiles for 32-bit ARM, too.
	out := m.run(`mkdir release.new; echo x >release.new/x # of a run that was interrupted
		export GOAMD64=v3 STAGE_ETC=no # for builds of one's own
		ARCHS=amd64,armhf source/scripts/release "$1" "$PWD/release"`, "v"+m.version)
	fingerprint := strings.TrimSpace(m.run("ssh-keygen -l -f ssh.pub | cut -d ' ' -f 2"))
	for _, want := range []string{"intact: csi-registrar " + m.version + ", commit ", "signed by " + fingerprint} {
		if !strings.Contains(out, want) {
			t.Errorf("scripts/release does not say %q:\n%s", want, out)
		}
	}
	files := strings.Fields(m.run("ls release"))
	// 4 debs, rpms and SBOMs, 2 system extensions, the source, NOTES.md, RELEASE, SHA256SUMS, 2
	// files of keys, a signature.
	if len(files) != 21 {
		t.Errorf("the release has %d files, want 21: %q", len(files), files)
	}
	settings := m.run("dpkg-deb --fsys-tarfile release/csi-registrar_*_amd64.deb | tar -xO ./usr/bin/csi-registrar >program; go version -m program; dpkg-deb -c release/csi-registrar_*_amd64.deb")
	for _, want := range []string{"GOAMD64=v1", "/etc/csi-registrar/config.toml"} {
		if !strings.Contains(settings, want) {
			t.Errorf("%s is missing in the deb:\n%s", want, settings)
		}
	}
	out, err := m.try(`cd source; git commit -q --allow-empty -m y; git tag -f "$1"; scripts/verify-release ../release "$2"`, "v"+m.version, fingerprint)
	if err == nil || !strings.Contains(out, "here, the release says") {
		t.Errorf("the tag is another commit in this clone: %v\n%s", err, out)
	}

	// The key is part of the release: without a fingerprint to compare it with, no program is run.
	out, err = m.try("source/scripts/verify-release release")
	if err == nil || strings.Contains(out, "intact") || !strings.Contains(out, "nothing was verified: the key in allowed_signers is "+fingerprint) {
		t.Errorf("without a fingerprint: %v\n%s", err, out)
	}

	// An older release is as well signed: who knows which one it should be is told.
	out, err = m.try(`source/scripts/verify-release release "$1" v9.9.9`, fingerprint)
	if err == nil || !strings.Contains(out, "the release is v"+m.version+", not v9.9.9") {
		t.Errorf("another release than the expected one: %v\n%s", err, out)
	}
	for _, kind := range []string{"deb", "rpm"} {
		swap := fmt.Sprintf(`set -- csi-registrar[_-][0-9]*.%s; mv "$1" ../swap; mv "$2" "$1"; mv ../swap "$2"`, kind)
		m.refuses(t, change{swap, ": FAILED"}, fingerprint)
		m.refuses(t, change{swap + "; resign ssh", "." + kind + " is csi-registrar"}, fingerprint)
	}

	// One architecture is sufficient for the rest.
	m.run("cd release; rm *_armhf.* *_arm.* *.armv7hl.*\n" + functions + "resign ssh")
	files = strings.Fields(m.run("ls release"))
	changes := maps.Clone(changesOfAll)
	for i, file := range files {
		for what, c := range eachFile {
			// A newline more or less after the armor is allowed.
			if file == "SHA256SUMS.sig" && (what == "one byte more" || what == "one byte less") {
				continue
			}
			next := files[(i+1)%len(files)]
			c.script = fmt.Sprintf("f=%q next=%q; ", file, next) + c.script
			c.says = strings.ReplaceAll(c.says, "FILE", file)
			if ofSignature(file) || strings.Contains(what, "next") && ofSignature(next) {
				c.says = ""
			}
			changes[file+": "+what] = c
		}
	}
	t.Logf("%d changes", len(changes))
	for _, name := range slices.Sorted(maps.Keys(changes)) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m.refuses(t, changes[name], fingerprint)
		})
	}
}

// ofSignature reports whether the file is read before the sums are compared.
func ofSignature(file string) bool {
	return file == "allowed_signers" || strings.HasPrefix(file, "SHA256SUMS")
}

// refuses checks that a changed copy of the release is refused.
func (m *maker) refuses(t *testing.T, c change, fingerprint string) {
	dir := filepath.Join(t.TempDir(), "d")
	own := &maker{t: t, dir: dir, env: m.env}
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	// The script without the rest of the source, as a user has it.
	own.run(`for f in ssh ssh.pub other other.pub source; do ln -s "$1/$f" .; done; cp -al "$1/release" release
		cp source/scripts/verify-release .`, m.dir)
	own.run("cd release\n" + functions + c.script)
	out, err := own.try(`PATH="$PWD/bin:$PATH" ./verify-release release ` + fingerprint)
	intact := strings.Contains(out, "intact")
	if intact != (err == nil) || intact != (c.says == "intact") || !strings.Contains(out, c.says) {
		t.Errorf("%v, want %q in\n%s", err, c.says, out)
	}
}
