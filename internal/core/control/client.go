package control

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/unixsock"
	"csi-registrar/internal/sys/worker"
)

// Path returns the path of the control socket of the daemon with this configuration root.
func Path(root string) string {
	return filepath.Join(root, "/run/csi-registrar/control.sock")
}

// ErrNotRunning is wrapped by a client's errors when no daemon serves the socket.
var ErrNotRunning = errors.New("csi-registrar is not running")

// ErrPathTooLong is wrapped by a client's errors when no daemon can serve the socket, now or
// later.
var ErrPathTooLong = errors.New("the path of the control socket is too long")

const (
	dialTimeout   = 3 * time.Second           // for the file system of the socket
	answerTimeout = 10 * time.Second          // the daemon answers from memory
	reloadTimeout = callTimeout + time.Second // the daemon's own limit ends first
	maxAnswer     = 16 << 20                  // 4,096 drivers with 1 kB each are 4 MB
	maxObjects    = 64 << 10                  // in an answer: a driver has at most four
	maxText       = 16 << 10                  // characters of an error
)

// Client sends requests to the daemon, each over a separate connection.
//
// Connecting does not start a stopped daemon: its socket is removed when it stops (RemoveOnStop= in
// the socket unit).
type Client struct {
	path  string
	limit time.Duration // for the head of an answer
}

// NewClient returns a client of the control socket at path; it does not connect yet.
func NewClient(path string) *Client { return &Client{path: path, limit: answerTimeout} }

// Status requests the status document.
func (c *Client) Status(ctx context.Context) (s status.Document, err error) {
	doc, err := c.call(ctx, http.MethodGet, "/v1/status", c.limit)
	if err == nil {
		s, err = decode(doc)
	}
	if err != nil {
		return status.Document{}, fmt.Errorf("cannot get the status: %w", err)
	}
	return s, nil
}

// decode decodes a status document of limited size: a small text can become a large value.
func decode(doc []byte) (s status.Document, err error) {
	if n := bytes.Count(doc, []byte("{")); n > maxObjects {
		return s, fmt.Errorf("the answer has %d objects, more than %d", n, maxObjects)
	}
	return s, json.Unmarshal(doc, &s)
}

// Metrics requests the metrics, in Prometheus' text format.
func (c *Client) Metrics(ctx context.Context) ([]byte, error) {
	text, err := c.call(ctx, http.MethodGet, "/metrics", c.limit)
	if err != nil {
		return nil, fmt.Errorf("cannot get the metrics: %w", err)
	}
	return text, nil
}

// call is send for an answer that is read as a whole: within twice the limit.
func (c *Client) call(ctx context.Context, method, target string, limit time.Duration) ([]byte, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, 2*limit, fmt.Errorf("its answer did not end within %s", 2*limit))
	defer cancel()
	body, err := c.send(ctx, method, target, limit)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	return io.ReadAll(io.LimitReader(body, maxAnswer))
}

// Watch yields the current document, and again whenever it has changed. It ends when ctx is done,
// or with an error, which is ErrNotRunning when the daemon ended.
func (c *Client) Watch(ctx context.Context) iter.Seq2[status.Document, error] {
	return func(yield func(status.Document, error) bool) {
		body, err := c.send(ctx, http.MethodGet, "/v1/status?watch", c.limit)
		if err != nil {
			if ctx.Err() == nil {
				yield(status.Document{}, fmt.Errorf("cannot get the status: %w", err))
			}
			return
		}
		defer body.Close()
		limited := &io.LimitedReader{R: body}
		documents := json.NewDecoder(limited)
		for {
			limited.N = maxAnswer
			var doc json.RawMessage
			err := documents.Decode(&doc)
			var s status.Document
			if err == nil {
				s, err = decode(doc)
			}
			switch {
			case ctx.Err() != nil:
				return
			case err != nil:
				yield(status.Document{}, fmt.Errorf("cannot watch the status any longer: %w", c.explain(err)))
				return
			case !yield(s, nil):
				return
			}
		}
	}
}

// Reload makes the daemon read its configuration again, see Backend. An *Error contains the errors
// of the configuration, one in each line.
func (c *Client) Reload(ctx context.Context, force bool) (notes []string, err error) {
	text, err := c.call(ctx, http.MethodPost, fmt.Sprintf("/v1/reload?force=%t", force), reloadTimeout)
	var answer reloaded
	if err == nil {
		err = json.Unmarshal(text, &answer)
	}
	if err != nil {
		return nil, fmt.Errorf("cannot reload the configuration: %w", err)
	}
	return answer.Notes, nil
}

// Reregister makes the daemon register the driver again. An *Error is the reason if it refuses.
func (c *Client) Reregister(ctx context.Context, name string, force bool) error {
	path := fmt.Sprintf("/v1/drivers/%s/reregister?force=%t", url.PathEscape(name), force)
	_, err := c.call(ctx, http.MethodPost, path, c.limit)
	if _, refused := errors.AsType[*Error](err); refused || err == nil {
		return err // its text names the driver and the request
	}
	return fmt.Errorf("cannot register %s again: %w", name, err)
}

// Error is the daemon's response to a request that failed.
type Error struct {
	Text string // may have several lines, as the errors of a configuration
	code int
}

// NotFound reports whether there is no such driver.
func (e *Error) NotFound() bool { return e.code == http.StatusNotFound }

// Error returns the text in one line.
func (e *Error) Error() string { return safetext.Clean(e.Text, maxText) }

// send sends a request without a body and returns the body of a successful response. The limit is
// only for the head of the response: a stream continues until ctx is done or it is closed.
func (c *Client) send(ctx context.Context, method, target string, limit time.Duration) (io.ReadCloser, error) {
	if err := unixsock.CheckPath(c.path); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrPathTooLong, err)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://csi-registrar"+target, nil)
	if err != nil {
		return nil, err
	}
	client := http.Client{Transport: &http.Transport{
		DialContext:           func(ctx context.Context, _, _ string) (net.Conn, error) { return c.dial(ctx) },
		DisableKeepAlives:     true,
		ResponseHeaderTimeout: limit,
	}}
	resp, err := client.Do(req)
	timeout, isNet := errors.AsType[net.Error](err)
	switch {
	case err == nil && resp.StatusCode == http.StatusOK:
		return resp.Body, nil
	case err == nil:
		defer resp.Body.Close()
		var f failure
		if err := json.NewDecoder(io.LimitReader(resp.Body, maxAnswer)).Decode(&f); err != nil || f.Error == "" {
			f.Error = strings.TrimSpace("it answered " + resp.Status)
		}
		return nil, &Error{Text: f.Error, code: resp.StatusCode}
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case isNet && timeout.Timeout() && !errors.Is(err, syscall.EAGAIN):
		return nil, fmt.Errorf("it did not answer within %s", limit)
	}
	return nil, c.explain(err)
}

// dial connects. That waits for the file system of the path only, which no context ends.
func (c *Client) dial(ctx context.Context) (net.Conn, error) {
	return worker.Get(ctx, worker.NewPool().Slot(c.path, nil), dialTimeout, func() (net.Conn, error) {
		return net.Dial("unix", c.path)
	}, func(conn net.Conn) { conn.Close() })
}

// explain returns an error that a user of the command understands.
func (c *Client) explain(err error) error {
	dial, ok := errors.AsType[*net.OpError](err)
	stuck, isStuck := errors.AsType[*worker.NotAnswering](err)
	switch {
	case isStuck:
		return stuck
	case !ok || dial.Op != "dial":
		// The daemon accepted the connection and closed it. The transport has several errors for
		// that, not all of them exported.
		return fmt.Errorf("%w (it closed the connection: it is stopping, or does not accept this user)", ErrNotRunning)
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%w (there is no %s)", ErrNotRunning, c.path)
	case errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("%w (nothing listens on %s)", ErrNotRunning, c.path)
	case errors.Is(err, syscall.EAGAIN):
		return fmt.Errorf("too many clients are waiting for the daemon: %w", dial)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("no access to %s: %w", c.path, fs.ErrPermission)
	}
	return dial
}
