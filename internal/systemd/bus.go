package systemd

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"time"
)

// The few D-Bus calls that this package makes are written by hand. With godbus, which
// go-systemd/dbus stands on, the stripped binary (gRPC, net/http, this package) was 0.29 MB
// larger; of the protocol, only strings, numbers and variants of them are needed here.

// manager tells where the service manager is spoken to.
type manager struct {
	booted  string // exists where systemd runs (sd_booted(3))
	private string // its own socket, for root alone: works early and late, without a broker
	broker  string // the system bus
}

func systemManager() manager {
	return manager{
		booted:  "/run/systemd/system",
		private: "/run/systemd/private",
		broker:  "/run/dbus/system_bus_socket",
	}
}

const (
	managerName    = "org.freedesktop.systemd1"
	managerPath    = "/org/freedesktop/systemd1"
	managerFace    = managerName + ".Manager"
	propertiesFace = "org.freedesktop.DBus.Properties"
)

// maxReply bounds a reply; the longest one expected here is an object path.
const maxReply = 1 << 20

// remoteError is a refusal by the other side, as opposed to a failure of the connection.
type remoteError struct{ name, text string }

func (e *remoteError) Error() string { return e.name + ": " + e.text }

// bus is a connection to the service manager, for one goroutine.
type bus struct {
	conn        net.Conn
	in          *bufio.Reader
	serial      uint32
	destination string // empty without a broker
	stop        func() bool
}

// dial connects to the manager itself or, where that is not possible, through the broker.
// The connection dies with ctx.
func (m manager) dial(ctx context.Context) (*bus, error) {
	b, err := dialSocket(ctx, m.private, false)
	if err == nil {
		return b, nil
	}
	b, err2 := dialSocket(ctx, m.broker, true)
	if err2 != nil {
		return nil, errors.Join(err, err2)
	}
	return b, nil
}

func dialSocket(ctx context.Context, path string, broker bool) (*bus, error) {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	b := &bus{conn: conn, in: bufio.NewReader(conn)}
	// A deadline that has passed ends reads and writes; it fails only after Close.
	b.stop = context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	if err := b.hello(broker); err != nil {
		b.close()
		return nil, fmt.Errorf("%s: %w", path, cmpErr(context.Cause(ctx), err))
	}
	return b, nil
}

func (b *bus) close() {
	b.stop()
	_ = b.conn.Close() // nothing was left unsaid
}

// hello authenticates by the credentials of the socket and, with a broker, asks for a name.
// BEGIN goes out with AUTH, as libsystemd's own clients do it: systemd does not look at a
// call that it reads together with BEGIN until it can read something more, which never
// comes. With its OK in hand, it has read BEGIN.
func (b *bus) hello(broker bool) error {
	uid := hex.EncodeToString([]byte(strconv.Itoa(os.Geteuid())))
	if _, err := fmt.Fprintf(b.conn, "\x00AUTH EXTERNAL %s\r\nBEGIN\r\n", uid); err != nil {
		return err
	}
	line, err := b.in.ReadSlice('\n')
	if err != nil {
		return err
	}
	if !bytes.HasPrefix(line, []byte("OK ")) {
		return fmt.Errorf("authentication refused: %q", bytes.TrimSpace(line))
	}
	if !broker {
		return nil
	}
	b.destination = "org.freedesktop.DBus"
	_, err = b.call("/org/freedesktop/DBus", b.destination, "Hello", "")
	b.destination = managerName
	return err
}

// property reads one property of an object.
func (b *bus) property(path, face, name string) (*reply, error) {
	r, err := b.call(path, propertiesFace, "Get", "ss", face, name)
	if err != nil {
		return nil, fmt.Errorf("%s.%s of %s: %w", face, name, path, err)
	}
	r.signature() // the variant's; the caller knows it
	return r, nil
}

// Types of messages and codes of header fields, as the D-Bus specification numbers them.
const (
	typeCall  = 1
	typeReply = 2
	typeError = 3

	fieldPath        = 1
	fieldInterface   = 2
	fieldMember      = 3
	fieldErrorName   = 4
	fieldReplySerial = 5
	fieldDestination = 6
	fieldSignature   = 8
)

// call calls a method whose arguments are strings (s) and uint32 (u) and waits for its
// reply, passing over signals.
func (b *bus) call(path, face, member, signature string, args ...any) (*reply, error) {
	var body message
	for _, arg := range args {
		switch v := arg.(type) {
		case string:
			body.string(v)
		case uint32:
			body.uint32(v)
		default:
			return nil, fmt.Errorf("no way to send a %T", arg)
		}
	}
	b.serial++
	m := message{'l', typeCall, 0, 1}
	m.uint32(uint32(len(body)))
	m.uint32(b.serial)
	m.uint32(0) // the length of the fields, below
	m.field(fieldPath, 'o', path)
	m.field(fieldInterface, 's', face)
	m.field(fieldMember, 's', member)
	if b.destination != "" {
		m.field(fieldDestination, 's', b.destination)
	}
	if signature != "" {
		m.field(fieldSignature, 'g', signature)
	}
	binary.LittleEndian.PutUint32(m[12:], uint32(len(m)-16))
	m.align(8)
	if _, err := b.conn.Write(append(m, body...)); err != nil {
		return nil, err
	}
	for {
		r, err := readReply(b.in)
		if err != nil {
			return nil, err
		}
		if r.to != b.serial {
			continue
		}
		if r.kind == typeError {
			return nil, &remoteError{name: r.errorName, text: r.string()}
		}
		return r, nil
	}
}

// message is one being written, in little endian.
type message []byte

func (m *message) align(n int) {
	for len(*m)%n != 0 {
		*m = append(*m, 0)
	}
}

func (m *message) uint32(v uint32) {
	m.align(4)
	*m = binary.LittleEndian.AppendUint32(*m, v)
}

func (m *message) string(s string) {
	m.uint32(uint32(len(s)))
	*m = append(append(*m, s...), 0)
}

// field writes a header field: its code and a variant.
func (m *message) field(code, kind byte, value string) {
	m.align(8)
	*m = append(*m, code, 1, kind, 0)
	if kind == 'g' { // a signature has its length in one byte
		*m = append(append(append(*m, byte(len(value))), value...), 0)
		return
	}
	m.string(value)
}

// reply is a message being read. What does not fit into it reads as zero and sets err.
type reply struct {
	order     binary.ByteOrder
	kind      byte
	to        uint32 // the serial of the call
	errorName string
	body      []byte
	at        int
	err       error
}

func readReply(in io.Reader) (*reply, error) {
	var head [16]byte
	if _, err := io.ReadFull(in, head[:]); err != nil {
		return nil, err
	}
	r := &reply{order: binary.LittleEndian, kind: head[1]}
	if head[0] == 'B' {
		r.order = binary.BigEndian
	}
	bodyLen, fieldsLen := r.order.Uint32(head[4:]), r.order.Uint32(head[12:])
	if bodyLen > maxReply || fieldsLen > maxReply {
		return nil, errors.New("the reply is too long")
	}
	fields := &reply{order: r.order, body: make([]byte, (fieldsLen+7)/8*8)}
	r.body = make([]byte, bodyLen)
	for _, part := range [][]byte{fields.body, r.body} {
		if _, err := io.ReadFull(in, part); err != nil {
			return nil, err
		}
	}
	fields.body = fields.body[:fieldsLen]
	for fields.at < len(fields.body) && fields.err == nil {
		fields.align(8)
		code := fields.byte()
		switch kind := fields.signature(); kind {
		case "u":
			if v := fields.uint32(); code == fieldReplySerial {
				r.to = v
			}
		case "s", "o":
			if v := fields.string(); code == fieldErrorName {
				r.errorName = v
			}
		case "g":
			fields.signature()
		default:
			return nil, fmt.Errorf("the reply has a header field of type %q", kind)
		}
	}
	return r, fields.err
}

// take returns the next n bytes.
func (r *reply) take(n int) []byte {
	if r.err == nil && n > len(r.body)-r.at {
		r.err = errors.New("the reply is too short")
	}
	if r.err != nil {
		return make([]byte, min(n, 8))
	}
	r.at += n
	return r.body[r.at-n : r.at]
}

func (r *reply) align(n int) {
	r.take((n - r.at%n) % n)
}

func (r *reply) byte() byte { return r.take(1)[0] }

func (r *reply) uint32() uint32 {
	r.align(4)
	return r.order.Uint32(r.take(4))
}

func (r *reply) string() string {
	n := r.uint32()
	if n > maxReply {
		r.err = errors.New("the reply has a string that is too long")
		return ""
	}
	return strings.TrimSuffix(string(r.take(int(n)+1)), "\x00")
}

func (r *reply) signature() string {
	n := int(r.byte())
	return strings.TrimSuffix(string(r.take(n+1)), "\x00")
}
