package bugreport

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

const planted = "S3cr3t/Pa55"

func TestSecretsAreTakenOut(t *testing.T) {
	random := "AQBLxK1kZm9vYmFyABAA8zzq9Tt0b2tlbg"
	for _, text := range []string{
		"token=" + planted,
		"password: " + planted + " and more",
		"mount failed: -o username=x,password=" + planted + ",vers=3",
		`rpc error: {"password":"` + planted + `"}`,
		`"reason": "rpc error: {\"password\":\"` + planted + `\"}"`,
		`"reason": "rpc error: {\"password\":\"a\\\"` + planted + `\"}"`,
		`{"adminPassword" : "` + planted + `"}`,
		`"password":"with blanks ` + planted + `"`,
		"Authorization: Bearer " + planted,
		"authorization=Basic " + planted,
		"got bearer " + planted,
		"FLAG: --bootstrap-token=" + planted,
		"kubelet --bootstrap-token " + planted + " --v 2",
		`FLAG: --tls-private-key="` + planted + `"`,
		"adminKey=" + planted,
		"https://user:" + planted + "@example.com/x",
		"https://user:a@" + planted + "@example.com/x",
		"ceph: key " + random,
		"blob " + "9j/4" + random,
		"hex 0a1b2c3d4e5f60718293a4b5c6d7e8f90a1b2c3d4e5f60718293a4b5c6d7e8f9",
		"eyJhbGciOi.eyJzdWIiOiIx." + planted,
		"-----BEGIN RSA PRIVATE KEY-----\n" + planted + "\n-----END RSA PRIVATE KEY-----\n",
		`"-----BEGIN PRIVATE KEY-----\n` + planted,
		"Environment=A=" + planted,
		"  Environment=\"A=b\" \\\n# C=" + planted + "\n  \"D=x\" \\\nE=" + planted,
		"SetCredential=x:" + planted,
		"volume_context:{key:\"server\" value:\"" + planted + "\"} more",
		`VolumeContext:map[share:{x [` + planted + `]}] more`,
		`{"volume_context":{"a":{"b":"` + planted + `"}},"x":1}`,
		`"found": "{\"volume_context\":{\"share\":\"` + planted + `\"}}"`,
		"volumeAttributes=" + planted,
		"secrets:<key:\"x\" value:\"" + planted + "\" >",
		"volume_context:{unbalanced " + planted,
		"Environment = X=" + planted,
		"\tEnvironment\t=\tX=" + planted,
		"#Environment=X=" + planted,
		" ; Environment = X=" + planted,
		"pwd => '" + planted + "'",
		"https://x.blob.example/c?sv=2024&sig=" + planted + "&se=2",
		`"url": "https://x.blob.example/c?sv=2024\\u0026sig=` + planted + `"`,
		"https%3A%2F%2Fx.blob.example%2Fc%3Fsv%3D2024%26sig%3D" + planted,
		"sasToken?sv=2024&" + planted,
		`secrets=map[string]string{"x":"a", "y":"` + planted + `"} more`,
		`secrets map[string]string{"x":"a", "y":"` + planted + `"} more`,
		"username=" + planted + ",vers=3",
		`{"userName": "` + planted + `"}`,
	} {
		got := (redactor{}).recognize("before\n" + text + "\nafter")
		if strings.Contains(got, planted) || strings.Contains(got, random) || strings.Contains(got, "0a1b2c") || !strings.Contains(got, mark) {
			t.Errorf("%s\nbecomes\n%s", text, got)
		}
		if !strings.HasPrefix(got, "before\n") || !strings.Contains(text, "END") && !strings.HasSuffix(got, "\nafter") {
			t.Errorf("%s\ntakes too much with it:\n%s", text, got)
		}
	}
}

func TestTheRestIsLeft(t *testing.T) {
	for _, text := range []string{
		"registered secrets-store.csi.k8s.io",
		`csi_registrar_state{driver="secrets-store.csi.k8s.io",state="registered"} 1`,
		"[driver.\"secrets-store.csi.k8s.io\"]\nsocket = \"/run/csi/csi.sock\"",
		"/var/lib/kubelet/pods/3f3a132b-b25c-11eb-9aba-a6b5a7ade690/volumes/kubernetes.io~csi/pvc-ad75ad47-01fe/mount",
		"/var/lib/kubelet/plugins_registry/nfs.csi.k8s.io-reg.sock",
		"INVOCATION_ID=4b0d6a1e1b6b4ddc9d2c6f4c1f0e9a77",
		"MutableCSINodeAllocatableCount=true EnvironmentFile=/etc/x",
		"secret \"x\" not found; the token was refused; a key is missing",
		"ReadWritePaths=/var/lib/kubelet -/var/lib/k0s/kubelet",
	} {
		r := redactor{}
		if got := r.repeated()(r.recognize(text)); got != text {
			t.Errorf("%s\nbecomes\n%s", text, got)
		}
	}
}

// Lines of real journals stay, also if a word of theirs was the password elsewhere.
func TestJournalLinesAreLeft(t *testing.T) {
	text, err := os.ReadFile("testdata/journal.txt")
	if err != nil {
		t.Fatal(err)
	}
	r := redactor{}
	r.recognize("bypass: sandbox")
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	if len(lines) < 50 {
		t.Errorf("only %d lines", len(lines))
	}
	for _, line := range lines {
		if got := r.repeated()(r.recognize(line)); got != line && !strings.Contains(line, "within sandbox") {
			t.Errorf("%s\nbecomes\n%s", line, got)
		}
	}
	for _, sentence := range sentences {
		if got := r.repeated()(r.recognize(sentence + "password=" + planted)); got != sentence+"password="+mark {
			t.Errorf("beside %q: %s", sentence, got)
		}
	}
}

// The ID of an access key identifies an account.
func TestAccessKeys(t *testing.T) {
	if got := (redactor{}).recognize("AKIAIOSFODNN7EXAMPLE is refused"); got != mark+" is refused" {
		t.Errorf("%s", got)
	}
}

// A word after the name of a secret is its value, unless it says how the secret is.
func TestWordsThatAreNoValues(t *testing.T) {
	r := redactor{}
	for _, word := range notValues {
		r.remember("password", word)
	}
	for _, word := range notValues {
		if text := "the mount is " + word; r.repeated()(text) != text {
			t.Errorf("%q becomes %q", text, r.repeated()(text))
		}
	}
}

func FuzzSecrets(f *testing.F) {
	f.Add(`password`, `"`)
	f.Add(`--token`, ` `)
	f.Fuzz(func(t *testing.T, before, between string) {
		(redactor{}).recognize(before + between + planted) // it ends, and does not panic
		if got := (redactor{}).recognize(before + "\npassword=" + planted + "\n" + between); strings.Contains(got, planted) {
			t.Errorf("%q", got)
		}
	})
}

// A secret that one part of an archive reveals is removed from all parts, before and after it.
func TestSecretOfAnotherPart(t *testing.T) {
	all := entries(t, text("a", "login with TOPSECRET refused\n"), text("b", "mount -o username=bob,password=TOPSECRET,vers=3\n"),
		text("c", `{"error":"TOPSECRET is wrong"}`+"\nregistered nfs.csi.k8s.io\n"))
	for name, want := range map[string]string{
		"a": "login with " + mark + " refused\n", "c": `{"error":"` + mark + ` is wrong"}` + "\nregistered nfs.csi.k8s.io\n",
	} {
		if all[name] != want {
			t.Errorf("%s is %q, want %q", name, all[name], want)
		}
	}
}

// A secret is also removed where it is encoded or a part of a word, and if it begins with another
// one.
func TestRepeatedSecrets(t *testing.T) {
	const secret = "S3cr3t/Pa55?!"
	r := redactor{}
	r.recognize("password=S3cr3t\npassword=" + secret + "\n")
	for text, want := range map[string]string{
		"login with " + secret + " refused":                                    "login with " + mark + " refused",
		"login with S3cr3t: refused":                                           "login with " + mark + ": refused",
		"x" + secret + "y":                                                     "x" + mark + "y",
		"b: " + base64.StdEncoding.EncodeToString([]byte(secret)):              "b: " + mark + "==",
		"b: " + base64.RawStdEncoding.EncodeToString([]byte(secret)):           "b: " + mark,
		"b: " + base64.StdEncoding.EncodeToString([]byte("S3cr3t")) + " is it": "b: " + mark + " is it",
		"p=" + url.QueryEscape(secret) + "&x=1":                                "p=" + mark + "&x=1",
		"S3cr3 and Pa55? are not":                                              "S3cr3 and Pa55? are not",
	} {
		if got := r.repeated()(text); got != want {
			t.Errorf("%q becomes %q, want %q", text, got, want)
		}
	}
}

// 20 MB with 10,000 secrets: a person waits for the archive.
func TestRepeatedSecretsOfALargeArchive(t *testing.T) {
	r := redactor{}
	var b strings.Builder
	for i := range 10_000 {
		r.remember("token", fmt.Sprintf("Token-%d-%d", i*7919%10_000, i))
		fmt.Fprintf(&b, "10:00:00 node kubelet[1]: Token-%d was refused for volume pvc-%d, Token-%d-%d\n", i, i, i*7919%10_000, i)
	}
	text := strings.Repeat(b.String(), 20<<20/b.Len())
	began := time.Now()
	got := r.repeated()(text)
	if took := time.Since(began); took > 30*time.Second {
		t.Errorf("it takes %s", took)
	}
	if strings.Count(got, mark) != strings.Count(text, "\n") {
		t.Errorf("%d secrets of %d are replaced", strings.Count(got, mark), strings.Count(text, "\n"))
	}
}

// A key in a journal, in either order, is removed, and no other text.
func TestPrivateKeysOfAJournal(t *testing.T) {
	body := strings.Repeat("MIIEvQIBADANBgkqhkiG9w0BAQEFAASC", 2)
	lines := []string{
		"10:00:00 node kubelet[1]: started",
		"10:00:01 node driver[2]: -----BEGIN PRIVATE KEY-----",
		"10:00:01 node driver[2]: " + body,
		"10:00:01 node driver[2]: Ab12Cd",
		"10:00:01 node driver[2]: -----END PRIVATE KEY-----",
		"10:00:02 node kubelet[1]: the volume is mounted now.",
		"10:00:03 node kubelet[1]: all is well.",
	}
	for range 2 {
		got := (redactor{}).recognize(strings.Join(lines, "\n") + "\n")
		for _, secret := range []string{body, "Ab12Cd"} {
			if strings.Contains(got, secret) {
				t.Errorf("%s is shown:\n%s", secret, got)
			}
		}
		if !strings.Contains(got, "mounted now.") || !strings.Contains(got, "all is well.") || !strings.Contains(got, "kubelet[1]: ") {
			t.Errorf("more than the key was removed:\n%s", got)
		}
		slices.Reverse(lines) // the newest first
	}
	// One end is missing, as if lines were cut off.
	if got := (redactor{}).recognize("-----BEGIN PRIVATE KEY-----\n" + body + "\na line that is none of it.\n"); !strings.Contains(got, "none of it.") || strings.Contains(got, body) {
		t.Errorf("%s", got)
	}
}

// text is a part that writes a text.
func text(name, s string) Part {
	return Part{Name: name, Write: func(_ context.Context, w io.Writer) error {
		_, err := io.WriteString(w, s)
		return err
	}}
}

// entries writes an archive and reads it.
func entries(t *testing.T, parts ...Part) map[string]string {
	t.Helper()
	var out bytes.Buffer
	if err := Write(t.Context(), &out, "dir", time.Unix(1e9, 9e8), parts); err != nil {
		t.Fatal(err)
	}
	z, err := gzip.NewReader(&out)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if err == io.EOF {
			return got
		}
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		name, ours := strings.CutPrefix(h.Name, "dir/")
		if !ours || h.Mode != 0o600 || h.Uname != "" || h.ModTime.Unix() != 1e9 {
			t.Errorf("%+v", h)
		}
		got[name] = string(b)
	}
}

func TestFailedPart(t *testing.T) {
	got := entries(t,
		Part{Name: "a", Write: func(_ context.Context, w io.Writer) error {
			_, err := io.WriteString(w, "whole\nhalf of token="+planted)
			return errors.Join(err, errors.New("broken: password="+planted))
		}},
		Part{Name: "b", Write: Command("no-such-program", "x")},
		Part{Name: "c", Plain: true, Write: text("", strings.Repeat("0123456789abcde\n", maxPart/16)+"more\n").Write},
		text("d", "fine"),
		Part{Name: "e", Plain: true, Write: text("", "token=version").Write},
	)
	want := []string{"a", "a.error", "b", "b.error", "c", "c.error", "d", "e"}
	if names := slices.Sorted(maps.Keys(got)); !slices.Equal(names, want) {
		t.Fatalf("%q, want %q", names, want)
	}
	if got["a"] != "whole\n" || got["a.error"] != "broken: password="+mark+"\n" {
		t.Errorf("a is %q, %q", got["a"], got["a.error"])
	}
	if !strings.Contains(got["b.error"], "cannot run no-such-program x: ") {
		t.Errorf("b is %q", got["b.error"])
	}
	if len(got["c"]) != maxPart || !strings.Contains(got["c.error"], "more than 4 MiB") {
		t.Errorf("c has %d bytes, %q", len(got["c"]), got["c.error"])
	}
	if got["d"] != "fine" || got["e"] != "token=version" {
		t.Errorf("%q, %q", got["d"], got["e"])
	}
}

// A part that never returns, as on a file system that does not answer, is abandoned.
func TestHangingPart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		got := entries(t, Part{Name: "a", Write: func(_ context.Context, w io.Writer) error {
			_, err := io.WriteString(w, "first\n")
			<-release
			_, lateErr := io.WriteString(w, "late\n")
			return errors.Join(err, lateErr)
		}}, text("b", "fine"))
		close(release)
		if got["a"] != "first\n" || got["a.error"] != "it took longer than 2m0s\n" || got["b"] != "fine" {
			t.Errorf("%q", got)
		}
	})
}

func TestInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	hang := Part{Name: "a", Write: func(ctx context.Context, _ io.Writer) error {
		cancel(errors.New("interrupted"))
		<-ctx.Done()
		return ctx.Err()
	}}
	if err := Write(ctx, io.Discard, "dir", time.Now(), []Part{hang, hang}); err == nil || err.Error() != "cannot finish: interrupted" {
		t.Errorf("%v", err)
	}
}

// The output of a command on both streams is kept, and the command does not see the user's
// environment.
func TestCommand(t *testing.T) {
	dir := t.TempDir()
	script := "#!/bin/sh\necho out \"$1\"; echo err >&2; echo \"$PAGER$LC_ALL\"; exit 3\n"
	if err := os.WriteFile(filepath.Join(dir, "systemctl"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	t.Setenv("PAGER", planted)
	got := entries(t, Part{Name: "a", Write: Command("systemctl", "cat it; x")})
	if got["a"] != "out cat it; x\nerr\nC.UTF-8\n" || got["a.error"] != "cannot run systemctl 'cat it; x': exit status 3\n" {
		t.Errorf("%q", got)
	}
}
