package driver

import (
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"csi-registrar/internal/unixsock"
)

// How much a driver may send in a minute. At rest that is a ping now and then.
const (
	talkBudget = 8 << 20
	restBudget = 64 << 10
)

// answerTimeout is how long a driver at rest may take to take our answer to its ping.
const answerTimeout = 5 * time.Second

var (
	errResting = errors.New("the connection is at rest")
	errFlood   = errors.New("the driver sends more than any answer needs")
)

// link is one connection to a driver's socket. First gRPC speaks over it, as over any
// net.Conn. Once all is asked it can be laid to rest: gRPC is closed without noticing that
// the connection is not, and a single small goroutine waits for its end. To the driver it
// is the same HTTP/2 connection, idle, whose peer answers pings (RFC 9113 §6.7).
//
// Why: a grpc.ClientConn keeps five goroutines and 41 kB for as long as it is open; at
// rest it is a tenth. What a connection is kept for is to notice at once when it breaks.
type link struct {
	raw     *net.UnixConn
	at      place // the file that it was connected to
	peer    unixsock.Cred
	onBreak func()

	ours   atomic.Bool // we ended it
	broken atomic.Bool // the other end did
	armed  atomic.Bool // that is news
	atRest atomic.Bool

	in frames // the reader's: gRPC's, then watch's

	outMu sync.Mutex
	out   frames

	budget      int // the reader's: bytes that may come until renewed+1m
	renewed     time.Time
	restingRead [64]byte
}

// Read is gRPC's.
func (l *link) Read(b []byte) (int, error) {
	if l.atRest.Load() {
		return 0, errResting
	}
	n, err := l.raw.Read(b)
	l.in.feed(b[:n], nil)
	if err == nil && !l.affords(n, talkBudget) {
		err = errFlood
	}
	if err != nil && !l.atRest.Load() {
		l.lost()
	}
	return n, err
}

// Write is gRPC's. What it writes at rest, its farewell, is swallowed.
func (l *link) Write(b []byte) (int, error) {
	l.outMu.Lock()
	defer l.outMu.Unlock()
	if l.atRest.Load() {
		return len(b), nil
	}
	n, err := l.raw.Write(b)
	l.out.feed(b[:n], nil)
	return n, err
}

// Close is gRPC's: the end, but at rest only the end of gRPC's reading.
func (l *link) Close() error {
	if l.atRest.Load() {
		return l.raw.SetReadDeadline(time.Unix(1, 0))
	}
	// When the other end goes before gRPC has begun, or says goodbye, gRPC closes without having
	// read the end. Where it is we who end it, ours is set already, and this is no news.
	l.lost()
	return l.raw.Close()
}

func (l *link) LocalAddr() net.Addr  { return l.raw.LocalAddr() }
func (l *link) RemoteAddr() net.Addr { return l.raw.RemoteAddr() }

func (l *link) SetDeadline(t time.Time) error {
	return errors.Join(l.SetReadDeadline(t), l.SetWriteDeadline(t))
}

func (l *link) SetReadDeadline(t time.Time) error {
	if l.atRest.Load() {
		return nil
	}
	return l.raw.SetReadDeadline(t)
}

func (l *link) SetWriteDeadline(t time.Time) error {
	if l.atRest.Load() {
		return nil
	}
	return l.raw.SetWriteDeadline(t)
}

// end closes the connection; nobody is told.
func (l *link) end() error {
	l.ours.Store(true)
	return l.raw.Close()
}

// lost marks the connection as broken while gRPC speaks, and tells if that is news.
func (l *link) lost() {
	if l.ours.Load() || l.broken.Swap(true) {
		return
	}
	if l.armed.Load() {
		l.onBreak()
	}
}

// lay lays the connection to rest. closeGRPC returns when gRPC has let go of it.
func (l *link) lay(closeGRPC func()) {
	l.outMu.Lock() // no write is under way
	l.atRest.Store(true)
	l.outMu.Unlock()
	closeGRPC()
	if !l.out.between() || l.raw.SetDeadline(time.Time{}) != nil {
		l.broken.Store(true) // half a frame was sent: nothing sensible can follow
	}
}

// watch waits for the end of a connection at rest.
func (l *link) watch() {
	defer l.raw.Close()
	l.budget, l.renewed = restBudget, time.Now()
	for !l.broken.Load() {
		n, err := l.raw.Read(l.restingRead[:])
		l.in.feed(l.restingRead[:n], func(kind, flags byte) {
			if e := l.answer(kind, flags); e != nil {
				err = e
			}
		})
		if err != nil || !l.affords(n, restBudget) {
			break
		}
	}
	if !l.ours.Load() {
		l.broken.Store(true)
		l.onBreak()
	}
}

// answer answers what a peer at rest must answer.
func (l *link) answer(kind, flags byte) error {
	var reply []byte
	switch {
	case kind == frameGoAway:
		return errResting // it will close the connection; do not wait for that
	case flags&flagAck != 0:
		return nil
	case kind == framePing:
		reply = append([]byte{0, 0, pingSize, framePing, flagAck, 0, 0, 0, 0}, l.in.ping[:]...)
	case kind == frameSettings:
		reply = []byte{0, 0, 0, frameSettings, flagAck, 0, 0, 0, 0}
	default:
		return nil // nothing else is of use to one who asks nothing
	}
	if err := l.raw.SetWriteDeadline(time.Now().Add(answerTimeout)); err != nil {
		return err
	}
	_, err := l.raw.Write(reply)
	return err
}

// affords counts n bytes against what may come in a minute.
func (l *link) affords(n, perMinute int) bool {
	if now := time.Now(); now.Sub(l.renewed) > time.Minute {
		l.budget, l.renewed = perMinute, now
	}
	l.budget -= n
	return l.budget >= 0
}
