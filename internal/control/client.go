package control

import (
	"bufio"
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

	"csi-registrar/internal/status"
)

// Path is where the control socket of the daemon with this configuration root is.
func Path(root string) string {
	return filepath.Join(root, "/run/csi-registrar/control.sock")
}

// ErrNotRunning is wrapped by a client's errors when no daemon serves the socket.
var ErrNotRunning = errors.New("csi-registrar does not run")

// ErrPathTooLong is wrapped by a client's errors when no daemon can serve the socket, now or
// later.
var ErrPathTooLong = errors.New("the path of the control socket is too long")

const (
	answerTimeout = 10 * time.Second          // the daemon answers from memory
	reloadTimeout = callTimeout + time.Second // its own limit comes first
	maxAnswer     = 64 << 20                  // 1,000 drivers with 1 kB each are 1 MB
)

// Client asks the daemon. Each call is a connection of its own, made with the few parts of
// net/http that the server needs too; http.Client and its transport would be twice that.
//
// Connecting starts no stopped daemon: its socket goes when it stops (RemoveOnStop= in the
// socket unit).
type Client struct {
	path  string
	limit time.Duration // for the head of an answer
}

// NewClient makes a client of the control socket at the path; it does not connect yet.
func NewClient(path string) *Client { return &Client{path: path, limit: answerTimeout} }

// Document is a status as the daemon wrote it, one line of JSON that is safe on a
// terminal. It may have fields that this program does not know.
type Document []byte

// Status reads the document.
func (d Document) Status() (status.Document, error) {
	var s status.Document
	if err := json.Unmarshal(d, &s); err != nil {
		return status.Document{}, fmt.Errorf("cannot read the status document: %w", err)
	}
	return s, nil
}

// Status asks for the document.
func (c *Client) Status(ctx context.Context) (Document, error) {
	body, err := c.call(ctx, http.MethodGet, "/v1/status", c.limit)
	if err != nil {
		return nil, fmt.Errorf("cannot ask for the status: %w", err)
	}
	defer body.Close()
	doc, err := io.ReadAll(io.LimitReader(body, maxAnswer))
	if err != nil {
		return nil, fmt.Errorf("cannot read the status: %w", err)
	}
	return doc, nil
}

// Watch yields the document as it is, and again whenever it has changed. It ends when ctx
// is done, or with an error, which is ErrNotRunning when the daemon ended.
func (c *Client) Watch(ctx context.Context) iter.Seq2[Document, error] {
	return func(yield func(Document, error) bool) {
		body, err := c.call(ctx, http.MethodGet, "/v1/status?watch", c.limit)
		if err != nil {
			if ctx.Err() == nil {
				yield(nil, fmt.Errorf("cannot ask for the status: %w", err))
			}
			return
		}
		defer body.Close()
		lines := bufio.NewReader(body)
		for {
			doc, err := lines.ReadBytes('\n')
			switch {
			case ctx.Err() != nil:
				return
			case err != nil:
				yield(nil, fmt.Errorf("cannot watch the status any longer: %w", c.explain(err)))
				return
			case !yield(doc, nil):
				return
			}
		}
	}
}

// Reload asks for the configuration to be read anew, and returns the daemon's verdict: an
// error of type Verdict has its mistakes.
func (c *Client) Reload(ctx context.Context) error {
	if err := c.post(ctx, "/v1/reload", reloadTimeout); err != nil {
		return fmt.Errorf("cannot reload the configuration: %w", err)
	}
	return nil
}

// Reregister asks for the driver to be registered again. An error of type Verdict says why
// the daemon does not.
func (c *Client) Reregister(ctx context.Context, name string) error {
	err := c.post(ctx, "/v1/drivers/"+url.PathEscape(name)+"/reregister", c.limit)
	if v, ok := errors.AsType[*Verdict](err); ok {
		return v // says all of it
	}
	if err != nil {
		return fmt.Errorf("cannot register %s again: %w", name, err)
	}
	return nil
}

// Verdict is what the daemon said where it did not do what it was asked for.
type Verdict struct {
	Text string // may have several lines, as the mistakes of a configuration
	code int
}

// Unknown tells that there is no such driver.
func (v *Verdict) Unknown() bool { return v.code == http.StatusNotFound }

func (v *Verdict) Error() string { return v.Text }

func (c *Client) post(ctx context.Context, target string, limit time.Duration) error {
	body, err := c.call(ctx, http.MethodPost, target, limit)
	if err != nil {
		return err
	}
	return body.Close()
}

// call sends a request and returns the body of its answer, if that is a success. The limit
// is for the head of the answer only: a stream goes on until ctx is done or it is closed.
func (c *Client) call(ctx context.Context, method, target string, limit time.Duration) (io.ReadCloser, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://csi-registrar"+target, nil)
	if err != nil {
		return nil, err
	}
	req.Close = true // one call, one connection
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if len(c.path) > maxPath {
		return nil, fmt.Errorf("%w: %s has %d bytes, at most %d are possible", ErrPathTooLong, c.path, len(c.path), maxPath)
	}
	// Connecting to a Unix socket does not wait. With ctx its deadline would be found out
	// by the network poller a moment before ctx itself says so.
	conn, err := net.Dial("unix", c.path)
	if err != nil {
		return nil, c.explain(err)
	}
	unhook := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) }) // fails every read and write from now on
	fail := func(err error) (io.ReadCloser, error) {
		unhook()
		err = errors.Join(err, conn.Close())
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return nil, err
	}
	slow := time.AfterFunc(limit, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	err = req.Write(conn)
	if err != nil && !errors.Is(err, syscall.EPIPE) { // the answer may say why it was not read
		return fail(c.explain(err))
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), req)
	if !slow.Stop() && ctx.Err() == nil {
		return fail(fmt.Errorf("it does not answer within %s", limit))
	}
	if err != nil {
		return fail(c.explain(err))
	}
	if resp.StatusCode != http.StatusOK {
		return fail(readVerdict(resp))
	}
	return &answer{Reader: resp.Body, close: func() error {
		unhook()
		return conn.Close() // resp.Body holds nothing, and its Close would read a stream to its end
	}}, nil
}

type answer struct {
	io.Reader
	close func() error
}

func (a *answer) Close() error { return a.close() }

func readVerdict(resp *http.Response) error {
	text, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	var f failure
	if err == nil {
		err = json.Unmarshal(text, &f)
	}
	if err != nil || f.Error == "" {
		f.Error = strings.TrimSpace("it answered " + resp.Status)
	}
	return &Verdict{Text: f.Error, code: resp.StatusCode}
}

// explain finds out of an error what it means for people.
func (c *Client) explain(err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%w (there is no %s)", ErrNotRunning, c.path)
	case errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("%w (nobody listens on %s)", ErrNotRunning, c.path)
	case errors.Is(err, syscall.EAGAIN):
		return fmt.Errorf("too many wait for the daemon's answer already: %w", err)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("no access to %s: %w", c.path, fs.ErrPermission)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		// Accepted and closed: it ended that moment, or does not take calls of this user.
		return fmt.Errorf("%w (it closed the connection: it is ending, or it takes no calls of this user)", ErrNotRunning)
	}
	return err
}
