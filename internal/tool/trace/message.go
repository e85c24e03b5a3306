package trace

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
			m.begin()
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

// begin reads the prefix of a message.
func (m *message) begin() {
	length := int64(m.prefix[1])<<24 | int64(m.prefix[2])<<16 | int64(m.prefix[3])<<8 | int64(m.prefix[4])
	compressed := m.prefix[0] != 0
	m.prefix = m.prefix[:0]
	m.left = length
	m.size += length
	m.count++
	if m.count == 1 {
		m.kept = !compressed && length <= maxMessage
		m.whole = m.kept && length == 0
	}
}

// release forgets what is kept of the message.
func (m *message) release(r *Recorder) {
	r.held -= len(m.first)
	m.first, m.kept, m.whole = nil, false, false
}
