package trace

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"csi-registrar/internal/sys/safetext"
)

func TestACallAsItIsRecorded(t *testing.T) {
	path := filepath.Join(socketDir(t), "d")
	serveCSI(t, path, func(_ context.Context, method string, _ proto.Message) (proto.Message, error) {
		if method == "NodeGetInfo" {
			return &csi.NodeGetInfoResponse{NodeId: "n", MaxVolumesPerNode: 16}, nil
		}
		return nil, status.Error(codes.Internal, "mount failed: 100% of\nänd \"x\"")
	})
	p := startProxy(t, path, nil)
	c := connect(t, p.path)
	before := time.Now()
	for range 2 {
		if _, err := invoke(t, t.Context(), c, "NodeGetInfo", &csi.NodeGetInfoRequest{}); err != nil {
			t.Fatal(err)
		}
	}
	for _, target := range []string{"/t", "/t", "/u"} {
		if _, err := invoke(t, t.Context(), c, "NodePublishVolume", publish("v", target)); err == nil {
			t.Fatal("no error")
		}
	}
	calls := p.wait(5)
	if again, other := calls[1].Attempt, calls[4].Attempt; again != 1 || other != 1 {
		t.Errorf("attempts after an OK %d, of another target %d", again, other)
	}
	if c := calls[0]; c.Method != "csi.v1.Node/NodeGetInfo" || c.Code != "OK" || c.End != Answered || c.Volume != "" || c.Attempt != 1 ||
		string(c.Request) != "{}" || string(c.Response) != `{"max_volumes_per_node":16,"node_id":"n"}` ||
		c.RequestBytes != 0 || c.ResponseBytes != 5 || c.Time.Before(before) || c.DurationMS <= 0 {
		t.Errorf("%+v", c)
	}
	if c := calls[3]; c.Volume != "v" || c.Attempt != 2 || c.Code != "Internal" || c.Error != "" || c.Response != nil {
		t.Errorf("%+v", c)
	}
}

// The text of an error is shown only if --show error asks for it; then whole, with escapes and
// limited, in the table and in JSON.
func TestErrorTexts(t *testing.T) {
	for said, want := range map[string]string{
		"login of bob with hunter2 failed":  "login of bob with hunter2 failed",
		"100% of\nänd \"x\"":                `100% of\nänd "x"`,
		"\x00\x1b[2J\u009b2J\u202e\x7f":     `\x00\x1b[2J\u009b2J\u202e\x7f`,
		strings.Repeat("x", 3*maxShownText): strings.Repeat("x", maxShownText-1) + "…",
	} {
		path := filepath.Join(socketDir(t), "d")
		serveCSI(t, path, func(context.Context, string, proto.Message) (proto.Message, error) {
			return nil, status.Error(codes.Internal, said)
		})
		for _, show := range [][]string{nil, {"server"}, {"server", ErrorText}} {
			p := startProxy(t, path, show)
			if _, err := invoke(t, t.Context(), connect(t, p.path), "NodePublishVolume", publish("v", "/t")); err == nil {
				t.Fatal("no error")
			}
			calls := p.wait(1)
			p.stop()
			c, text := calls[0], printed(t, p.rec, calls)
			switch {
			case c.Code != "Internal":
				t.Errorf("%+v", c)
			case slices.Contains(show, ErrorText):
				if inJSON, _ := json.Marshal(want); c.Error != want || !strings.Contains(text, `"error":`+string(inJSON)) {
					t.Errorf("%q is shown as %q, want %q", said, text, want)
				}
			case c.Error != "" || strings.Contains(text, want[:4]) || strings.Contains(text, `"error"`):
				t.Errorf("--show %q: %q is shown: %q", show, said, text)
			}
		}
	}
}

// A status message that is not UTF-8 is shown in escapes, one that is broken as it is.
func TestUnescapedErrors(t *testing.T) {
	for sent, want := range map[string]string{"%ff%00": `\xff\x00`, "100%": "100%", "%zz": "%zz", "": ""} {
		w := newWire("")
		w.headers(t, 1, true, ":status", "200", "grpc-status", "13", "grpc-message", sent)
		ask := newWire(http2.ClientPreface)
		ask.ask(t, 1, "/csi.v1.Node/NodePublishVolume", publish("v", "/t"))
		rec := NewRecorder([]string{ErrorText})
		at := time.Unix(1e9, 0)
		rec.now = func() time.Time { return at }
		conn := newConnection(rec)
		rec.take(conn, toDriver, ask.Bytes())
		rec.take(conn, toCaller, w.Bytes())
		rec.Close()
		if c := <-rec.Calls(); c.Code != "Internal" || c.Error != want {
			t.Errorf("%q is shown as %q, want %q", sent, c.Error, want)
		}
	}
}

// Messages that are compressed or too large are counted and passed on, and the connection stays
// readable.
func TestMessagesThatAreNotDecoded(t *testing.T) {
	path := filepath.Join(socketDir(t), "d")
	serveCSI(t, path, func(_ context.Context, method string, r proto.Message) (proto.Message, error) {
		if method == "CreateVolume" {
			return &csi.CreateVolumeResponse{Volume: &csi.Volume{VolumeId: strings.Repeat("x", maxMessage)}}, nil
		}
		return &csi.NodePublishVolumeResponse{}, nil
	})
	p := startProxy(t, path, nil)
	c := connect(t, p.path)
	large := &csi.NodePublishVolumeRequest{VolumeId: "v", TargetPath: strings.Repeat("x", maxMessage)}
	if _, err := invoke(t, t.Context(), c, "NodePublishVolume", large); err != nil {
		t.Fatal(err)
	}
	full, _ := methodNamed(t, "NodePublishVolume")
	if err := c.Invoke(t.Context(), full, publish("v", "/t"), &csi.NodePublishVolumeResponse{}, grpc.UseCompressor(gzip.Name)); err != nil {
		t.Fatal(err)
	}
	if _, err := invoke(t, t.Context(), c, "CreateVolume", create("n")); err != nil {
		t.Fatal(err)
	}
	if _, err := invoke(t, t.Context(), c, "NodePublishVolume", publish("v", "/t")); err != nil {
		t.Fatal(err)
	}
	calls := p.wait(4)
	if c := calls[0]; c.Request != nil || c.RequestBytes != int64(proto.Size(large)) || c.Code != "OK" || string(c.Response) != "{}" {
		t.Errorf("large request: %+v", c)
	}
	if c := calls[1]; c.Request != nil || c.RequestBytes == 0 || c.Code != "OK" {
		t.Errorf("compressed request: %+v", c)
	}
	if c := calls[2]; c.Volume != "n" || c.Response != nil || c.ResponseBytes <= maxMessage || c.Code != "OK" {
		t.Errorf("large answer: %+v", c)
	}
	if c := calls[3]; c.Volume != "v" || c.Code != "OK" {
		t.Errorf("the call after them: %+v", c)
	}
	p.stop()
	if p.rec.held != 0 || p.rec.notDecoded+p.rec.notWritten != 0 || len(p.rec.running) != 0 {
		t.Errorf("kept: %d bytes, %+v, %d", p.rec.held, p.rec.notDecoded+p.rec.notWritten, len(p.rec.running))
	}
}

// wire writes the frames of one side.
type wire struct {
	bytes.Buffer
	framer  *http2.Framer
	encoded bytes.Buffer
	encoder *hpack.Encoder
}

func newWire(preface string) *wire {
	w := &wire{}
	w.WriteString(preface)
	w.framer = http2.NewFramer(&w.Buffer, nil)
	w.encoder = hpack.NewEncoder(&w.encoded)
	return w
}

func (w *wire) headers(t testing.TB, stream uint32, end bool, pairs ...string) {
	t.Helper()
	w.encoded.Reset()
	for i := 0; i < len(pairs); i += 2 {
		if err := w.encoder.WriteField(hpack.HeaderField{Name: pairs[i], Value: pairs[i+1]}); err != nil {
			t.Fatal(err)
		}
	}
	block := w.encoded.Bytes()
	first := min(len(block), 10) // the rest is a CONTINUATION
	if err := w.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: block[:first], EndStream: end, EndHeaders: first == len(block), PadLength: 3}); err != nil {
		t.Fatal(err)
	}
	if first < len(block) {
		if err := w.framer.WriteContinuation(stream, true, block[first:]); err != nil {
			t.Fatal(err)
		}
	}
}

func (w *wire) message(t testing.TB, stream uint32, end bool, m proto.Message) {
	t.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	data := append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(b))), b...)
	for len(data) > 3 { // in small frames, with padding
		if err := w.framer.WriteDataPadded(stream, false, data[:3], make([]byte, 5)); err != nil {
			t.Fatal(err)
		}
		data = data[3:]
	}
	if err := w.framer.WriteData(stream, end, data); err != nil {
		t.Fatal(err)
	}
}

func (w *wire) ask(t testing.TB, stream uint32, method string, m proto.Message) {
	t.Helper()
	w.headers(t, stream, false, ":method", "POST", ":scheme", "http", ":path", method, ":authority", "x", "content-type", "application/grpc", "te", "trailers")
	w.message(t, stream, true, m)
}

// exchangeOn is a connection with two calls at once, one of which is cancelled.
func exchangeOn(t testing.TB) (toDriverBytes, toCallerBytes []byte) {
	t.Helper()
	ask, answer := newWire(http2.ClientPreface), newWire("")
	// The driver takes a larger table of headers, and the caller makes use of it.
	if err := answer.framer.WriteSettings(http2.Setting{ID: http2.SettingHeaderTableSize, Val: 8192}); err != nil {
		t.Fatal(err)
	}
	if err := ask.framer.WriteSettings(); err != nil {
		t.Fatal(err)
	}
	ask.encoder.SetMaxDynamicTableSizeLimit(8192)
	ask.encoder.SetMaxDynamicTableSize(8192)
	ask.ask(t, 1, "/csi.v1.Node/NodePublishVolume", publish("v", "/t"))
	ask.ask(t, 3, "/csi.v1.Node/NodeUnpublishVolume", unpublish("w", "/u"))
	answer.headers(t, 1, false, ":status", "200", "content-type", "application/grpc")
	answer.message(t, 1, false, &csi.NodePublishVolumeResponse{})
	answer.headers(t, 1, true, "grpc-status", "0")
	if err := ask.framer.WriteRSTStream(3, http2.ErrCodeCancel); err != nil {
		t.Fatal(err)
	}
	return ask.Bytes(), answer.Bytes()
}

// decodeInPieces decodes a connection whose bytes come in pieces of a size, the caller's
// first but for what follows its calls.
func decodeInPieces(rec *Recorder, size int, ask, answer []byte) {
	at := time.Unix(1e9, 0)
	rec.now = func() time.Time { at = at.Add(time.Millisecond); return at }
	conn := newConnection(rec)
	feed := func(dir direction, data []byte) {
		for piece := range slices.Chunk(data, size) {
			rec.take(conn, dir, piece)
		}
	}
	feed(toCaller, answer[:min(len(answer), 15)]) // its SETTINGS
	last := max(0, len(ask)-13)                   // RST_STREAM
	feed(toDriver, ask[:last])
	feed(toCaller, answer[min(len(answer), 15):])
	feed(toDriver, ask[last:])
	rec.end(conn)
	rec.Close()
}

func TestFramesInPieces(t *testing.T) {
	ask, answer := exchangeOn(t)
	for _, size := range []int{1, 2, 7, 9, 10, 100, 1 << 20} {
		rec := NewRecorder(nil)
		decodeInPieces(rec, size, ask, answer)
		var calls []Call
		for c := range rec.Calls() {
			calls = append(calls, c)
		}
		if len(calls) != 2 || rec.notDecoded+rec.notWritten != 0 {
			t.Fatalf("pieces of %d: %+v, left out %+v", size, calls, rec.notDecoded+rec.notWritten)
		}
		if c := calls[0]; c.Name() != "NodePublishVolume" || c.Volume != "v" || c.Code != "OK" || string(c.Response) != "{}" {
			t.Errorf("pieces of %d: %+v", size, c)
		}
		if c := calls[1]; c.Name() != "NodeUnpublishVolume" || c.Volume != "w" || c.End != Cancelled || c.Code != "" {
			t.Errorf("pieces of %d: %+v", size, c)
		}
	}
}

// Data that no decoder can follow is left out, and the calls before it are recorded as lost.
func TestWhatCannotBeDecodedIsLeftOut(t *testing.T) {
	begin := func() *wire {
		w := newWire(http2.ClientPreface)
		w.ask(t, 1, "/csi.v1.Node/NodePublishVolume", publish("v", "/t"))
		return w
	}
	for name, add := range map[string]func(w *wire) error{
		"a frame that is too large": func(w *wire) error { return w.framer.WriteData(1, false, make([]byte, maxFrame+1)) },
		"headers that never end": func(w *wire) error {
			err := w.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 3, BlockFragment: []byte{0x82}})
			for range maxFrame / 1000 {
				if err == nil {
					err = w.framer.WriteContinuation(3, false, bytes.Repeat([]byte{0x82}, 1000))
				}
			}
			return err
		},
		"broken headers": func(w *wire) error {
			return w.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 3, BlockFragment: []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, EndHeaders: true})
		},
		"too many calls": func(w *wire) error {
			for i := range uint32(maxCalls) {
				w.headers(t, 3+2*i, false, ":method", "POST", ":scheme", "http", ":path", "/a.B/C")
			}
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := begin()
			if err := add(w); err != nil {
				t.Fatal(err)
			}
			rec := NewRecorder(nil)
			rec.events = make(chan Call, 2*maxCalls)
			decodeInPieces(rec, copyBuffer, w.Bytes(), nil)
			var calls []Call
			for c := range rec.Calls() {
				if c.Name() == "NodePublishVolume" {
					calls = append(calls, c)
				}
			}
			if len(calls) != 1 || calls[0].End != Lost || calls[0].Volume != "v" || rec.notDecoded != 1 || len(rec.running) != 0 || rec.held != 0 {
				t.Errorf("%+v, left out %+v, running %d, held %d", calls, rec.notDecoded+rec.notWritten, len(rec.running), rec.held)
			}
		})
	}
}

// Whether the caller or the driver's gRPC ends a call at the caller's limit is by chance.
func TestACallThatTimesOut(t *testing.T) {
	path := filepath.Join(socketDir(t), "d")
	end := make(chan struct{})
	defer close(end)
	serveCSI(t, path, func(_ context.Context, method string, _ proto.Message) (proto.Message, error) {
		if method != "Probe" {
			<-end // a driver that does not look at its context
		}
		return &csi.ProbeResponse{}, nil
	})
	p := startProxy(t, path, nil)
	c := connect(t, p.path)
	// It is connected.
	if _, err := invoke(t, t.Context(), c, "Probe", &csi.ProbeRequest{}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	if _, err := invoke(t, ctx, c, "NodePublishVolume", publish("v", "/t")); status.Code(err) != codes.DeadlineExceeded {
		t.Fatal(err)
	}
	if c := p.wait(2)[1]; c.End != TimedOut || c.Code != "" {
		t.Errorf("%+v", c)
	}
}

func TestTimeLimits(t *testing.T) {
	for s, want := range map[string]time.Duration{
		"119999m": 119999 * time.Millisecond, "2M": 2 * time.Minute, "1H": time.Hour, "5S": 5 * time.Second, "7u": 7 * time.Microsecond, "99999999n": 99999999,
		"": 0, "m": 0, "5": 0, "5x": 0, "-5S": 0, "99999999H": 0, "123456789S": 0,
	} {
		if got := timeLimit(s); got != want {
			t.Errorf("%q is %s, want %s", s, got, want)
		}
	}
}

func TestOnlyNamesOfMethodsAreShown(t *testing.T) {
	for path, want := range map[string]string{
		"/csi.v1.Node/NodePublishVolume":     "csi.v1.Node/NodePublishVolume",
		"/grpc.health.v1.Health/Check":       "grpc.health.v1.Health/Check",
		"/a/b\x1b[31m":                       "(unknown method)",
		"/a/b?password=x":                    "(unknown method)",
		"":                                   "(unknown method)",
		"/" + strings.Repeat("a", 81) + "/b": "(unknown method)",
	} {
		if got := newCall(path, time.Time{}).Method; got != want {
			t.Errorf("%q is %q", path, got)
		}
	}
}

// Calls that are not read are counted, and hold up nothing.
func TestASlowReaderMissesCalls(t *testing.T) {
	ask := newWire(http2.ClientPreface)
	const n = maxEvents + 10
	for i := range uint32(n) {
		ask.ask(t, 1+2*i, "/csi.v1.Node/NodePublishVolume", publish("v", "/t"))
		if err := ask.framer.WriteRSTStream(1+2*i, http2.ErrCodeCancel); err != nil {
			t.Fatal(err)
		}
	}
	rec := NewRecorder(nil)
	decodeInPieces(rec, copyBuffer, ask.Bytes(), nil)
	if got := len(rec.Calls()); got != maxEvents || rec.notWritten != 10 || rec.methods["csi.v1.Node/NodePublishVolume"].calls != n {
		t.Errorf("%d calls, left out %+v", got, rec.notDecoded+rec.notWritten)
	}
}

// A call that does not end is shown once, and then when it has ended.
func TestALongCallIsShownWhileItRuns(t *testing.T) {
	ask := newWire(http2.ClientPreface)
	ask.ask(t, 1, "/csi.v1.Node/NodePublishVolume", publish("v", "/t"))
	rec := NewRecorder(nil)
	at := time.Unix(1e9, 0)
	rec.now = func() time.Time { return at }
	conn := newConnection(rec)
	rec.take(conn, toDriver, ask.Bytes())
	for i := range 10 {
		rec.showRunning(at.Add(time.Duration(i) * time.Second))
	}
	at = at.Add(20 * time.Second)
	rec.end(conn)
	rec.Close()
	var ends []string
	for c := range rec.Calls() {
		ends = append(ends, string(c.End)+" "+round(c.Duration())+" "+c.Volume)
	}
	if got := strings.Join(ends, ", "); got != "running 5s v, disconnected 20s v" {
		t.Error(got)
	}
}

// For any input, the decoder ends, keeps nothing, and its record is JSON, with error texts that are
// escaped.
func FuzzDecode(f *testing.F) {
	ask, answer := exchangeOn(f)
	f.Add(ask, answer, uint16(7))
	f.Add(ask[:len(ask)-20], answer[:len(answer)/2], uint16(1000))
	f.Add([]byte(http2.ClientPreface), []byte{}, uint16(1))
	failed := newWire(string(answer[:15])) // its SETTINGS
	failed.headers(f, 1, true, ":status", "200", "grpc-status", "13", "grpc-message", "%1b%ff")
	f.Add(ask, failed.Bytes(), uint16(1000))
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"), []byte("HTTP/1.1 400 Bad Request\r\n\r\n"), uint16(100))
	f.Fuzz(func(t *testing.T, ask, answer []byte, size uint16) {
		rec := NewRecorder([]string{ErrorText})
		decodeInPieces(rec, 1+int(size), ask, answer)
		for c := range rec.Calls() {
			if b, err := json.Marshal(c); err != nil || !json.Valid(b) {
				t.Errorf("%+v: %v", c, err)
			}
			if c.Error != safetext.Clean(c.Error, maxShownText) {
				t.Errorf("an error text that is not escaped: %q", c.Error)
			}
			if row := NewTable(80).Row(c); len([]rune(row)) > 80 {
				t.Errorf("over 80 columns: %s", row)
			}
		}
		if rec.held != 0 || len(rec.running) != 0 {
			t.Errorf("kept: %d, %d", rec.held, len(rec.running))
		}
		_ = rec.Summary() // must not panic
	})
}
