package doctor

import (
	"context"
	"crypto/rand"
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"csi-registrar/internal/unixsock"
)

// ClientPrefix begins the abstract addresses that our own clients bind to, so that the
// daemon does not take them for the kubelet (as in package kubelet, which says it too).
const ClientPrefix = "@csi-registrar-"

const (
	askTime  = time.Second // the kubelet's own limit for GetInfo
	maxAsked = 64          // sockets at a time
	maxDepth = 8
)

// plugin is a live socket in plugins_registry, and what it answers.
type plugin struct {
	path     string
	pid      int // who called listen: not who answers now, where systemd kept the socket
	endpoint string
	versions []string
}

// plugins asks all sockets that the kubelet sees for the CSI driver that they serve.
func (x *exam) plugins(ctx context.Context) map[string][]plugin {
	var (
		mu    sync.Mutex
		wg    sync.WaitGroup
		out   = map[string][]plugin{}
		slots = make(chan struct{}, maxAsked)
	)
	for _, path := range sockets(x.registry(), 0) {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			name, p, err := getInfo(ctx, path)
			if err != nil {
				return // dead, or no registration socket; the driver's own is looked at later
			}
			mu.Lock()
			defer mu.Unlock()
			out[name] = append(out[name], p)
		})
	}
	wg.Wait()
	return out
}

// sockets lists what the kubelet looks at: not what begins with a dot.
func sockets(dir string, depth int) (found []string) {
	entries, _ := os.ReadDir(dir) // what cannot be seen cannot be asked
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		switch {
		case strings.HasPrefix(e.Name(), "."):
		case e.IsDir() && depth < maxDepth:
			found = append(found, sockets(path, depth+1)...)
		case e.Type()&(fs.ModeSocket|fs.ModeSymlink) != 0:
			found = append(found, path)
		}
	}
	return found
}

// getInfo asks a registration socket as the kubelet does. The name is empty for a
// plugin that is no CSI driver.
func getInfo(ctx context.Context, path string) (name string, p plugin, err error) {
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	c, pid, err := dial(ctx, path)
	if err != nil {
		return "", plugin{}, err
	}
	defer c.Close()
	conn, err := over(c)
	if err != nil {
		return "", plugin{}, err
	}
	defer conn.Close()
	info, err := registerapi.NewRegistrationClient(conn).GetInfo(ctx, &registerapi.InfoRequest{})
	if err != nil {
		return "", plugin{}, err
	}
	p = plugin{path: path, pid: pid, endpoint: info.GetEndpoint(), versions: info.GetSupportedVersions()}
	if info.GetType() != registerapi.CSIPlugin {
		return "", p, nil
	}
	return info.GetName(), p, nil
}

// dial connects to a Unix socket and tells which process listens there, 0 if unknown.
func dial(ctx context.Context, path string) (c *net.UnixConn, pid int, err error) {
	c, cred, err := dialAs(ctx, path)
	return c, cred.PID, err
}

func dialAs(ctx context.Context, path string) (*net.UnixConn, unixsock.Cred, error) {
	d := net.Dialer{LocalAddr: &net.UnixAddr{Net: "unix", Name: ClientPrefix + rand.Text()}}
	conn, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, unixsock.Cred{}, err
	}
	c := conn.(*net.UnixConn)
	cred, err := unixsock.PeerCred(c)
	if err != nil {
		return nil, unixsock.Cred{}, errors.Join(err, c.Close())
	}
	return c, cred, nil
}

// listening tells whether somebody accepts connections at a path.
func listening(ctx context.Context, path string) bool {
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	c, _, err := dialAs(ctx, path)
	if err != nil {
		return false
	}
	c.Close()
	return true
}

// maxAnswer bounds what a stranger may send.
const maxAnswer = 1 << 20

// over makes a client of one connection; when that ends the client does not make another.
func over(c net.Conn) (*grpc.ClientConn, error) {
	var once sync.Once
	return grpc.NewClient("passthrough:///socket",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
			err := net.ErrClosed
			once.Do(func() { err = nil })
			return c, err
		}),
		grpc.WithDisableServiceConfig(),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswer)),
		grpc.WithIdleTimeout(0),
	)
}
