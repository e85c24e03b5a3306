package trace

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/url"
	"strconv"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc/codes"
)

// Limits of one connection. gRPC's frames have 16 KiB at most, unless a peer announces that
// it takes larger ones.
const (
	maxFrame       = 64 << 10 // bytes of a frame, and of a list of headers
	maxHeaderTable = 64 << 10 // bytes of HPACK's dynamic table
	maxMessage     = 1 << 20  // bytes of a message that is decoded; larger ones are only counted
	maxMessages    = 16 << 20 // bytes of all messages that are being received
)

// decoder follows one connection: HTTP/2 (RFC 9113) with gRPC's messages.
type decoder struct {
	rec   *Recorder
	sides [2]side
	calls map[uint32]*call // by stream
}

// side is what comes from one end.
type side struct {
	buf     bytes.Buffer
	framer  *http2.Framer
	headers *hpack.Decoder
	preface int // bytes of http2.ClientPreface to come
}

func newDecoder(rec *Recorder) *decoder {
	d := &decoder{rec: rec, calls: map[uint32]*call{}}
	for i := range d.sides {
		s := &d.sides[i]
		s.headers = hpack.NewDecoder(4096, nil)
		s.framer = http2.NewFramer(io.Discard, &s.buf)
		s.framer.SetMaxReadFrameSize(maxFrame)
		s.framer.SetReuseFrames()
		s.framer.ReadMetaHeaders = s.headers
		s.framer.MaxHeaderListSize = maxFrame
	}
	d.sides[toDriver].preface = len(http2.ClientPreface)
	return d
}

// write decodes what came from one end at a time. After an error the connection cannot be
// followed any more.
func (d *decoder) write(dir direction, data []byte, at time.Time) error {
	s := &d.sides[dir]
	if n := min(s.preface, len(data)); n > 0 {
		from := len(http2.ClientPreface) - s.preface
		if string(data[:n]) != http2.ClientPreface[from:from+n] {
			return errors.New("not HTTP/2")
		}
		s.preface -= n
		data = data[n:]
	}
	s.buf.Write(data)
	for {
		whole, err := s.whole()
		if err != nil || !whole {
			return err
		}
		frame, err := s.framer.ReadFrame()
		if stream, is := errors.AsType[http2.StreamError](err); is {
			d.finish(stream.StreamID, Lost, at) // the connection goes on
			continue
		}
		if err != nil {
			return err
		}
		if err := d.frame(dir, frame, at); err != nil {
			return err
		}
	}
}

// frameHeader is the length of a frame's header in bytes.
const frameHeader = 9

// whole reports whether the next frame is there, for the framer would take the end of the
// buffer for the end of the connection. Headers are whole with all their CONTINUATIONs.
func (s *side) whole() (bool, error) {
	rest := bytes.NewReader(s.buf.Bytes())
	for size := 0; ; {
		h, err := http2.ReadFrameHeader(rest)
		if size += frameHeader + int(h.Length); err == nil && size > frameHeader+maxFrame {
			return false, fmt.Errorf("a frame of more than %d bytes", maxFrame)
		}
		if err != nil || rest.Len() < int(h.Length) {
			return false, nil // the rest is to come
		}
		hasMore := (h.Type == http2.FrameHeaders || h.Type == http2.FrameContinuation) && !h.Flags.Has(http2.FlagHeadersEndHeaders)
		if !hasMore {
			return true, nil
		}
		_, _ = rest.Seek(int64(h.Length), io.SeekCurrent) // it cannot fail
	}
}

func (d *decoder) frame(dir direction, frame http2.Frame, at time.Time) error {
	switch f := frame.(type) {
	case *http2.MetaHeadersFrame:
		return d.gotHeaders(dir, f, at)
	case *http2.DataFrame:
		if c := d.calls[f.StreamID]; c != nil {
			c.messages[dir].write(f.Data(), d.rec)
		}
		if f.StreamEnded() {
			d.ended(dir, f.StreamID, at)
		}
	case *http2.RSTStreamFrame:
		end := Cancelled
		if dir == toCaller {
			end = Reset
		}
		d.finish(f.StreamID, end, at)
	case *http2.SettingsFrame:
		// It limits the table of the other end, which may go on with the old limit for a
		// while: a lower one is ignored here.
		if size, has := f.Value(http2.SettingHeaderTableSize); has && size > 4096 {
			d.sides[1-dir].headers.SetAllowedMaxDynamicTableSize(min(size, maxHeaderTable))
		}
	case *http2.PushPromiseFrame:
		return errors.New("a push promise, which gRPC does not have")
	}
	return nil
}

func (d *decoder) gotHeaders(dir direction, f *http2.MetaHeadersFrame, at time.Time) error {
	c := d.calls[f.StreamID]
	if dir == toDriver && c == nil {
		if len(d.rec.running) >= maxCalls {
			return fmt.Errorf("more than %d calls at once", maxCalls)
		}
		c = newCall(f.PseudoValue("path"), at)
		d.calls[f.StreamID] = c
		d.rec.running[c] = true
	}
	if c == nil {
		return nil // of a call that has ended
	}
	for _, h := range f.RegularFields() {
		switch h.Name {
		case "grpc-status":
			if n, err := strconv.ParseUint(h.Value, 10, 32); err == nil && dir == toCaller {
				c.trailers, c.status = true, codes.Code(n)
			}
		case "grpc-timeout":
			if dir == toDriver {
				c.limit = timeLimit(h.Value)
			}
		case "grpc-message":
			c.text = h.Value
			if text, err := url.PathUnescape(h.Value); err == nil {
				c.text = text
			}
		}
	}
	if status := f.PseudoValue("status"); dir == toCaller && status != "" && status[0] != '1' && status != "200" && !c.trailers {
		c.trailers, c.status, c.text = true, codes.Unknown, "HTTP status"
	}
	if f.StreamEnded() {
		d.ended(dir, f.StreamID, at)
	}
	return nil
}

// ended is called when one end has sent all.
func (d *decoder) ended(dir direction, stream uint32, at time.Time) {
	c := d.calls[stream]
	switch {
	case c == nil:
	case dir == toDriver:
		d.rec.ask(c)
	case c.trailers:
		d.finish(stream, Answered, at)
	default:
		d.finish(stream, Reset, at) // an answer without a status
	}
}

// finish ends a call, if there is one.
func (d *decoder) finish(stream uint32, end End, at time.Time) {
	c := d.calls[stream]
	if c == nil {
		return
	}
	d.rec.ask(c)
	delete(d.calls, stream)
	d.rec.answer(c, end, at)
	for i := range c.messages {
		c.messages[i].release(d.rec)
	}
}

// close ends all calls of the connection.
func (d *decoder) close(end End, at time.Time) {
	for stream := range d.calls {
		d.finish(stream, end, at)
	}
}

// message is what one side sends in a call: one message, or several where it is a stream.
type message struct {
	prefix []byte // of a message: whether it is compressed, and its length
	left   int64  // bytes of it to come
	size   int64  // bytes of all messages
	count  int    // of messages that have begun
	first  []byte // the first message, if it is kept
	kept   bool   // it is neither compressed nor too large
	whole  bool   // first is complete
}

// prefixLength is the length in bytes of what precedes each message in gRPC over HTTP/2.
const prefixLength = 5

func (m *message) write(data []byte, r *Recorder) {
	for len(data) > 0 {
		if m.left == 0 {
			n := min(prefixLength-len(m.prefix), len(data))
			m.prefix = append(m.prefix, data[:n]...)
			data = data[n:]
			if len(m.prefix) < prefixLength {
				return
			}
			m.left = int64(binary.BigEndian.Uint32(m.prefix[1:]))
			m.size += m.left
			m.count++
			if m.count == 1 {
				m.kept = m.prefix[0] == 0 && m.left <= maxMessage
				m.whole = m.kept && m.left == 0
			}
			m.prefix = m.prefix[:0]
			continue
		}
		n := int(min(m.left, int64(len(data))))
		if m.kept && m.count == 1 {
			if r.held+n > maxMessages {
				m.release(r)
			} else {
				r.held += n
				m.first = append(m.first, data[:n]...)
			}
		}
		data = data[n:]
		m.left -= int64(n)
		m.whole = m.whole || m.kept && m.left == 0
	}
}

// release forgets what is kept of the message.
func (m *message) release(r *Recorder) {
	r.held -= len(m.first)
	m.first, m.kept, m.whole = nil, false, false
}
