{{- /* The sidecar's container, as an init container that goes on (sidecar mode) or the only one. */ -}}
{{- define "kvferry.sidecarContainer" -}}
{{- $sizes := include "kvferry.sizes" . | fromYaml -}}
- name: kvferry
  image: {{ include "kvferry.image" (dict "root" . "image" .Values.image) }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  {{- if eq .Values.mode "sidecar" }}
  restartPolicy: Always
  {{- end }}
  args: [serve, --config, {{ include "kvferry.configDir" . }}/kvferry.toml]
  env:
    # No setting comes from the environment but this one; see the ConfigMap.
    - name: HOME
      value: /tmp
    {{- include "kvferry.gpuEnv" . | trim | nindent 4 }}
    {{- with .Values.sidecar.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- include "kvferry.sidecarProbes" . | nindent 2 }}
  resources:
    requests:
      cpu: {{ .Values.sidecar.cpu | quote }}
      memory: {{ $sizes.memoryMi }}Mi
    limits:
      memory: {{ $sizes.memoryMi }}Mi
      {{- with .Values.rdma.resources }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    {{- if has .Values.gpu.access (list "dra" "draAdmin") }}
    claims:
      - name: gpu
    {{- end }}
  securityContext:
    {{- include "kvferry.sidecarSecurity" . | nindent 4 }}
  volumeMounts:
    - name: run
      mountPath: {{ include "kvferry.mountDir" . }}
    - name: pool
      mountPath: /dev/shm
    - name: config
      mountPath: {{ include "kvferry.configDir" . }}
      readOnly: true
    - name: sidecar-tmp
      mountPath: /tmp
    {{- with .Values.sidecar.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{- define "kvferry.sidecarSecurity" -}}
{{- if eq .Values.gpu.access "privileged" -}}
privileged: true
readOnlyRootFilesystem: true
{{- else -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- if .Values.rdma.ipcLock }}
  add: [IPC_LOCK]
  {{- end }}
{{- end -}}
{{- end }}

{{- /* Volumes of the pod that holds the sidecar, but for "run". */ -}}
{{- define "kvferry.sidecarVolumes" -}}
{{- $sizes := include "kvferry.sizes" . | fromYaml -}}
- name: pool
  emptyDir:
    medium: Memory
    sizeLimit: {{ $sizes.shmMi }}Mi
- name: config
  configMap:
    name: {{ include "kvferry.fullname" . }}-sidecar
- name: sidecar-tmp
  emptyDir:
    sizeLimit: 256Mi
{{- with .Values.sidecar.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "kvferry.podSecurity" -}}
runAsNonRoot: {{ ne (int64 .Values.user) 0 }}
runAsUser: {{ int64 .Values.user }}
runAsGroup: {{ int64 .Values.user }}
fsGroup: {{ int64 .Values.user }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "kvferry.podCommon" -}}
automountServiceAccountToken: false
# Services named kvferry would otherwise put variables of that name into every container.
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* `kvferry status` is answered by the loop itself. Started means: the pool is taken and the
sockets listen. It never waits for ranks: they come after it, and the engine waits for this. */ -}}
{{- define "kvferry.sidecarProbes" -}}
{{- $sizes := include "kvferry.sizes" . | fromYaml -}}
{{- $status := list "kvferry" "status" "--json" "--run-dir" (include "kvferry.runDir" .) -}}
startupProbe:
  exec:
    command: {{ toJson $status }}
  periodSeconds: 2
  timeoutSeconds: 10
  failureThreshold: {{ div (int64 $sizes.startupSeconds) 2 }}
livenessProbe:
  exec:
    command: {{ toJson $status }}
  periodSeconds: 20
  timeoutSeconds: 10
  failureThreshold: 6
{{- end }}
