package trace

import (
	"context"
	"encoding/base64"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// sayingDriver answers every call with an error of a text.
type sayingDriver struct {
	mu   sync.Mutex
	text string
}

func (d *sayingDriver) say(text string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.text = text
}

func (d *sayingDriver) answer(context.Context, string, proto.Message) (proto.Message, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return nil, status.Error(codes.Internal, d.text)
}

// TestErrorTextsHaveNoSecrets: with --show error a driver's words are shown without what any call
// of the trace had as a secret; without it none of its words is.
func TestErrorTextsHaveNoSecrets(t *testing.T) {
	pem := "-----BEGIN PRIVATE KEY-----\n" + strings.Repeat("MIIEvQIBADANBgkqhkiG9w0B", 3) + "\nAASCBKcwggSjAgEAAoIBAQ\n-----END PRIVATE KEY-----\n"
	long := strings.Repeat("x7Kq", 3<<10)
	const stage, publishing = "NodeStageVolume", "NodePublishVolume"
	secrets := map[string]string{"file": "hunter2-from-file\n", "key": pem, "long": long, "json": `{"login":"bob","pin":"4711x"}`, "user": "carol", "password": "mellon99"}
	for name, c := range map[string]struct {
		said   string
		hidden []string
		shown  string
	}{
		"without its final newline": {"login with hunter2-from-file failed", []string{"hunter2"}, "login with (hidden) failed"},
		"in another case":           {"login with HUNTER2-FROM-FILE failed", []string{"HUNTER2"}, "login with (hidden) failed"},
		"of JSON":                   {"pin 4711x is wrong", []string{"4711x"}, "pin (hidden) is wrong"},
		"quoted key":                {fmt.Sprintf("bad key %q here", pem), []string{"MIIEvQ", "AASCBK"}, "bad key"},
		"more than 8 KiB":           {"bad " + long, []string{"x7Kq"}, "bad (hidden)"},
		"base64 of user:password":   {"Basic " + base64.StdEncoding.EncodeToString([]byte("carol:mellon99")), []string{"bWVsbG9u", "Om1lbGxvb"}, "Basic"},
		"metadata":                  {"who is Zx81-meta-value?", []string{"Zx81"}, "who is (hidden)?"},
		"token in the context":      {"token tok-en-1234567 expired", []string{"tok-en"}, "token (hidden) expired"},
		"harmless":                  {"mount.nfs: Connection timed out", nil, "mount.nfs: Connection timed out"},
	} {
		for _, show := range [][]string{nil, {ErrorText}} {
			t.Run(fmt.Sprint(name, show), func(t *testing.T) {
				t.Parallel()
				path := filepath.Join(socketDir(t), "d")
				d := &sayingDriver{text: "nothing yet"}
				serveCSI(t, path, d.answer)
				p := startProxy(t, path, show)
				conn := connect(t, p.path)
				ctx := metadata.AppendToOutgoingContext(t.Context(), "x-session", "Zx81-meta-value")
				staged := &csi.NodeStageVolumeRequest{VolumeId: "v", StagingTargetPath: "/s", Secrets: secrets,
					VolumeContext: map[string]string{"csi.storage.k8s.io/serviceAccount.tokens": "tok-en-1234567", "server": "nfs"}}
				if _, err := invoke(t, ctx, conn, stage, staged); err == nil {
					t.Fatal("no error")
				}
				// Another call repeats them, which had none itself.
				d.say(c.said)
				if _, err := invoke(t, t.Context(), conn, publishing, publish("v", "/t")); err == nil {
					t.Fatal("no error")
				}
				calls := p.wait(2)
				p.stop()
				text := printed(t, p.rec, calls)
				for _, secret := range c.hidden {
					if strings.Contains(text, secret) {
						t.Errorf("%q is shown: %s", secret, text)
					}
				}
				if got := calls[1].Error; show == nil && got != "" || show != nil && !strings.Contains(got, c.shown) {
					t.Errorf("the error is shown as %q, want %q", got, c.shown)
				}
			})
		}
	}
}

// TestErrorTextsOfAnIncompleteTrace checks that no error text is shown if a message was not
// decoded, because it could have had a secret.
func TestErrorTextsOfAnIncompleteTrace(t *testing.T) {
	path := filepath.Join(socketDir(t), "d")
	d := &sayingDriver{text: "words"}
	serveCSI(t, path, d.answer)
	p := startProxy(t, path, []string{ErrorText})
	conn := connect(t, p.path)
	for _, secret := range []string{"a", strings.Repeat("x", maxMessage)} {
		if _, err := invoke(t, t.Context(), conn, "NodeStageVolume", &csi.NodeStageVolumeRequest{Secrets: map[string]string{"k": secret}}); err == nil {
			t.Fatal("no error")
		}
	}
	if _, err := invoke(t, t.Context(), conn, "NodePublishVolume", publish("v", "/t")); err == nil {
		t.Fatal("no error")
	}
	calls := p.wait(3)
	if calls[0].Error != "words" || calls[1].Error != hiddenText || calls[2].Error != hiddenText {
		t.Errorf("%q, %q, %q", calls[0].Error, calls[1].Error, calls[2].Error)
	}
}

// TestErrorTextsLearnSecrets checks, place by place, that what may be a secret is known when a
// later error repeats it, and that nothing is shown once something may be unknown.
func TestErrorTextsLearnSecrets(t *testing.T) {
	const secret = "Zx81-hidden-value"
	many := make([]byte, 0, 100)
	for range maxElements {
		many = protowire.AppendVarint(protowire.AppendTag(many, 1000, protowire.VarintType), 7)
	}
	many = protowire.AppendString(protowire.AppendTag(many, 1001, protowire.BytesType), secret)
	unknown := &csi.NodePublishVolumeRequest{VolumeId: "v"}
	unknown.ProtoReflect().SetUnknown(many)
	mount := &csi.NodePublishVolumeRequest{VolumeCapability: &csi.VolumeCapability{AccessType: &csi.VolumeCapability_Mount{
		Mount: &csi.VolumeCapability_MountVolume{MountFlags: []string{"user=bob,password=" + secret}}}}}
	learnt := func(learn func(e *errorTexts)) string {
		e := newErrorTexts([]string{ErrorText})
		learn(e)
		return e.shown("bad " + secret)
	}
	ofMessage := func(m proto.Message) func(*errorTexts) {
		return func(e *errorTexts) {
			r := &redactor{}
			r.message(m.ProtoReflect())
			e.learn(r, nil)
		}
	}
	for name, c := range map[string]struct {
		learn func(*errorTexts)
		want  string
	}{
		"nothing":                   {func(*errorTexts) {}, "bad " + secret},
		"a mount flag":              {ofMessage(mount), "bad " + hiddenText},
		"a field that is not known": {ofMessage(unknown), "bad " + hiddenText},
		"metadata":                  {func(e *errorTexts) { e.learn(&redactor{}, []string{secret}) }, "bad " + hiddenText},
		"a message that is not CSI": {func(e *errorTexts) {
			e.learnBytes(&message{first: []byte(secret), whole: true, size: 17, count: 1}, nil)
		}, "bad " + hiddenText},
		"more messages":                     {func(e *errorTexts) { e.learnBytes(&message{whole: true, size: 2, count: 2}, nil) }, hiddenText},
		"a message that is not kept":        {func(e *errorTexts) { e.learnBytes(&message{size: 2, count: 1}, nil) }, hiddenText},
		"a message of which a part is kept": {func(e *errorTexts) { e.learn(&redactor{partial: true}, nil) }, hiddenText},
		"a gap":                             {(*errorTexts).forget, hiddenText},
	} {
		if got := learnt(c.learn); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
	rec := NewRecorder([]string{ErrorText})
	rec.take(newConnection(rec), toDriver, []byte("GET"))
	if got := rec.errors.shown("bad " + secret); got != hiddenText {
		t.Errorf("after a connection that cannot be decoded: %q", got)
	}
}

// TestErrorTextsLearnFromAnswers checks that the secrets of an answer, and of a header of any name,
// are known.
func TestErrorTextsLearnFromAnswers(t *testing.T) {
	path := filepath.Join(socketDir(t), "d")
	serveCSI(t, path, func(_ context.Context, method string, _ proto.Message) (proto.Message, error) {
		if method == "ControllerPublishVolume" {
			return &csi.ControllerPublishVolumeResponse{PublishContext: map[string]string{"password": "Zx81-answer"}}, nil
		}
		return nil, status.Error(codes.Internal, "Zx81-answer differs from Zx82-header")
	})
	p := startProxy(t, path, []string{ErrorText})
	conn := connect(t, p.path)
	ctx := metadata.AppendToOutgoingContext(t.Context(), "authorization", "Zx82-header")
	if _, err := invoke(t, ctx, conn, "ControllerPublishVolume", &csi.ControllerPublishVolumeRequest{VolumeId: "v", NodeId: "n"}); err != nil {
		t.Fatal(err)
	}
	if _, err := invoke(t, t.Context(), conn, "NodePublishVolume", publish("v", "/t")); err == nil {
		t.Fatal("no error")
	}
	if got := p.wait(2)[1].Error; got != "(hidden) differs from (hidden)" {
		t.Errorf("%q", got)
	}
}
