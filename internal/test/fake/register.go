package fake

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// attempt registers one socket, and sets the backoff.
func (k *Kubelet) attempt(ctx context.Context, path string, want identity) {
	err := k.register(ctx, path, want)
	k.mu.Lock()
	defer k.mu.Unlock()
	k.busy[path] = false
	if ctx.Err() != nil {
		return
	}
	if err == nil {
		delete(k.backoff, path)
		return
	}
	by := min(max(2*k.backoff[path].by, firstBackoff), longestBackoff)
	k.backoff[path] = backoff{time.Now().Add(by), by}
}

func (k *Kubelet) register(ctx context.Context, path string, want identity) error {
	p := plugin{want, Registration{Socket: path}}
	tell := func(what Action, reason error) {
		if ctx.Err() == nil {
			e := Event{At: time.Now(), What: what, Seen: want.at, Registration: p.Registration}
			if reason != nil {
				e.Reason = reason.Error()
			}
			k.report(e)
		}
	}
	conn, err := dial(path)
	if err != nil {
		return err
	}
	defer conn.Close()
	client := registration.NewRegistrationClient(conn)
	limited, cancel := context.WithTimeout(ctx, getInfoTimeout)
	info, err := client.GetInfo(limited, &registration.InfoRequest{}, grpc.WaitForReady(true))
	cancel()
	if err != nil {
		tell(Unanswered, err) // the kubelet does not notify the plugin either
		return err
	}
	p.Driver, p.Endpoint = info.GetName(), info.GetEndpoint()
	refusal := k.accept(ctx, info, &p)
	status := &registration.RegistrationStatus{PluginRegistered: refusal == nil}
	if refusal != nil {
		status.Error = refusal.Error()
		tell(Refused, refusal)
	} else {
		tell(Registered, nil)
	}
	limited, cancel = context.WithTimeout(ctx, notifyTimeout)
	defer cancel()
	_, err = client.NotifyRegistrationStatus(limited, status)
	if err != nil && refusal == nil && ctx.Err() == nil {
		k.mu.Lock()
		if now, found := k.actual[path]; found && now.n == want.n {
			k.deregister(path, now, "Notify failed: "+err.Error())
		}
		k.mu.Unlock()
	}
	return errors.Join(refusal, err)
}

// accept validates the plugin, asks the driver, and adds the plugin.
func (k *Kubelet) accept(ctx context.Context, info *registration.PluginInfo, p *plugin) error {
	if info.GetType() != registration.CSIPlugin {
		return fmt.Errorf("%q is not a CSI plugin", info.GetType())
	}
	k.mu.Lock()
	holder, taken := k.paths[p.Driver]
	if !taken {
		k.paths[p.Driver] = p.Socket
	}
	k.mu.Unlock()
	if taken {
		return fmt.Errorf("%s is already registered from %s with the same version", p.Driver, holder)
	}
	err := ask(ctx, info, p)
	k.mu.Lock()
	defer k.mu.Unlock()
	if err == nil {
		err = k.api.update(p.Registration)
	}
	if err != nil || ctx.Err() != nil {
		delete(k.paths, p.Driver)
		return errors.Join(err, ctx.Err())
	}
	k.actual[p.Socket] = *p
	return nil
}

// ask calls the driver's NodeGetInfo.
func ask(ctx context.Context, info *registration.PluginInfo, p *plugin) error {
	if !slices.ContainsFunc(info.GetSupportedVersions(), func(v string) bool { return strings.HasPrefix(strings.TrimPrefix(v, "v"), "1.") }) {
		return fmt.Errorf("no version of CSI 1.x among %q", info.GetSupportedVersions())
	}
	if _, err := os.Stat(p.Endpoint); err != nil {
		return fmt.Errorf("cannot see the driver's endpoint: %w", err)
	}
	conn, err := dial(p.Endpoint)
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, nodeInfoTimeout)
	defer cancel()
	node, err := csi.NewNodeClient(conn).NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	if err != nil {
		return fmt.Errorf("NodeGetInfo: %w", err)
	}
	if n := len(node.GetNodeId()); n == 0 || n > maxNodeIDLength {
		return fmt.Errorf("the node id has %d characters, 1 to %d are allowed", n, maxNodeIDLength)
	}
	p.NodeID, p.Limit, p.Topology = node.GetNodeId(), node.GetMaxVolumesPerNode(), node.GetAccessibleTopology().GetSegments()
	return nil
}

func dial(path string) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
}
