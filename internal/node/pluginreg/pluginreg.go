// Package pluginreg reads the plugins_registry as the kubelet does: it finds the registration
// sockets in it and calls GetInfo on them. kubelet and doctor use it.
package pluginreg

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"csi-registrar/internal/sys/grpcconn"
	"csi-registrar/internal/sys/unixsock"
)

// Sockets returns the sockets in dir and below, and the symbolic links that may point to one, that
// the kubelet (v1.36) uses: it ignores names that begin with a dot. A directory below dir that
// cannot be read is skipped; a dir that does not exist has none. Sockets blocks for as long as the
// file system does not answer.
func Sockets(dir string) (found []string, err error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		switch {
		case strings.HasPrefix(e.Name(), "."):
		case e.IsDir():
			below, _ := Sockets(path)
			found = append(found, below...)
		case e.Type()&(fs.ModeSocket|fs.ModeSymlink) != 0:
			found = append(found, path)
		}
	}
	return found, err
}

// Info is the answer of a registration socket to GetInfo. Its strings are untrusted.
type Info struct {
	Type     string // registerapi.CSIPlugin, DRAPlugin or DevicePlugin
	Name     string
	Endpoint string
	// Store is the header StoreHeader: HasStore or NoStore of a csi-registrar, else empty.
	Store string
}

// A csi-registrar says in the header of its answer whether it has a descriptor store: one without,
// such as a sidecar of the driver, yields to one that has it.
const (
	StoreHeader = "csi-registrar-descriptor-store"
	HasStore    = "yes"
	NoStore     = "no"
)

// maxMessage is the maximum size of an answer in bytes: usually it has a few hundred.
const maxMessage = 64 << 10

// GetInfo calls GetInfo on the socket at path, as the kubelet does (which waits 1 s for the answer,
// kubelet v1.36). It also returns the process that listens there.
func GetInfo(ctx context.Context, path string) (Info, unixsock.Cred, error) {
	c, err := unixsock.Dial(ctx, path)
	if err != nil {
		return Info{}, unixsock.Cred{}, err
	}
	defer c.Close()
	cred, err := unixsock.PeerCred(c)
	if err != nil {
		return Info{}, cred, err
	}
	cc, err := grpcconn.New(c, maxMessage)
	if err != nil {
		return Info{}, cred, err
	}
	defer cc.Close()
	var header metadata.MD
	in, err := registerapi.NewRegistrationClient(cc).GetInfo(ctx, &registerapi.InfoRequest{}, grpc.Header(&header))
	return Info{
		Type: in.GetType(), Name: in.GetName(), Endpoint: in.GetEndpoint(),
		Store: strings.Join(header.Get(StoreHeader), ","),
	}, cred, err
}
