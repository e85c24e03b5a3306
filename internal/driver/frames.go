package driver

import "encoding/binary"

const (
	frameHeader = 9  // bytes (RFC 9113 §4.1)
	pingSize    = 8  // bytes (RFC 9113 §6.7)
	prefaceSize = 24 // bytes that a client sends before its first frame (RFC 9113 §3.4)

	frameSettings = 0x4
	framePing     = 0x6
	frameGoAway   = 0x7
	flagAck       = 0x1
)

// frames follows the boundaries of HTTP/2 frames in a stream of bytes, in whatever pieces
// it comes. It keeps no payload but that of a ping.
type frames struct {
	skip int // bytes before the first frame
	head [frameHeader]byte
	have int // of head
	left int // of the payload
	ping [pingSize]byte
}

// between tells that the stream stands between two frames.
func (f *frames) between() bool { return f.skip == 0 && f.have == 0 }

// feed takes the next bytes and calls whole, if it is not nil, at the end of each frame.
func (f *frames) feed(b []byte, whole func(kind, flags byte)) {
	n := min(f.skip, len(b))
	f.skip -= n
	b = b[n:]
	for len(b) > 0 {
		if f.have < frameHeader {
			n = copy(f.head[f.have:], b)
			if f.have += n; f.have == frameHeader {
				f.left = int(binary.BigEndian.Uint32(f.head[:4]) >> 8)
			}
		} else {
			n = min(f.left, len(b))
			if f.head[3] == framePing {
				if f.left > pingSize { // no ping that RFC 9113 knows: keep its last bytes
					n = min(n, f.left-pingSize)
				} else {
					copy(f.ping[pingSize-f.left:], b[:n])
				}
			}
			f.left -= n
		}
		b = b[n:]
		if f.have == frameHeader && f.left == 0 {
			f.have = 0
			if whole != nil {
				whole(f.head[3], f.head[4])
			}
		}
	}
}
